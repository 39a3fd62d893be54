import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from unisono.algorithms import list_algorithms
from unisono.algorithms.pipelines import SCHEDULES
from unisono.cli import list_
from unisono.cli.main import app
from unisono.program.defaults import TABLE
from unisono.schedule import COLLECTIVES


def test_lists_every_algorithm_under_its_collective() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    listed, under = [], ""
    for line in result.stdout.splitlines():
        first = line.split(" ")[0]
        if first in COLLECTIVES:
            under = first
        elif first in {e.name for e in list_algorithms()}:
            listed.append((under, first))
    assert listed == [(e.collective, e.name) for e in list_algorithms()]


def test_lists_one_collective_with_steps_and_bytes() -> None:
    lines = CliRunner().invoke(app, ["list", "all_to_all"]).stdout.splitlines()
    assert lines[0] == "all_to_all"
    assert lines[1].split()[:3] == ["algorithm", "steps", "bytes"]
    assert lines[2].split()[:4] == ["bruck", "L", "<=", "L/2"]
    assert "pairwise" in lines[7]
    assert lines[7].endswith("Tournament: ranks swap in pairs; serves in place.")  # nothing is cut for a pipe


def on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is printed where the output is a terminal of so many columns."""
    drawn: list[str] = []
    monkeypatch.setattr(list_, "Console", lambda **how: Console(**{**how, "width": width}))
    monkeypatch.setattr(list_, "show", lambda console, table: drawn.append(text_of(console, table)))
    monkeypatch.setattr(list_, "echo", drawn.append)
    list_.list_()
    return "\n".join(drawn).splitlines()


def text_of(console: Console, table: Table) -> str:
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_on_a_terminal_each_algorithm_has_one_line_and_no_formula_is_cut(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = on_a_terminal(width, monkeypatch)
    assert max(map(len, lines)) <= width
    for info in list_algorithms():
        words = [info.name, *(str(formula).replace(" ", "") for formula in (info.steps, info.nbytes_per_rank))]
        assert any(
            line.startswith(info.name) and all(word in line.replace(" ", "") for word in words) for line in lines
        )
    assert len(lines) == len(list_algorithms()) + len(SCHEDULES) + 3 * (len(COLLECTIVES) + 1) + (
        5 if "What they do is left out" in "\n".join(lines) else 4
    )


def test_an_unknown_collective_is_one_line() -> None:
    result = CliRunner().invoke(app, ["list", "foo"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("unisono: unknown collective 'foo': expected one of all_reduce, ")


def test_a_star_marks_what_runs_by_default() -> None:
    starred, under = set(), ""
    for line in CliRunner().invoke(app, ["list"]).stdout.splitlines():
        words = line.split()
        if words and words[0] in COLLECTIVES:
            under = words[0]
        elif words[1:2] == ["*"]:
            starred.add((under, words[0]))
        elif words[:1] == ["*"]:
            assert line == "* runs by default: `unisono plan --default` says from which size to which."
    assert starred == {(row.collective, row.schedule) for row in TABLE}
