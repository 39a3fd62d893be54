from typer.testing import CliRunner

from unisono.algorithms import list_algorithms
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
    assert max(map(len, lines)) <= 110


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
