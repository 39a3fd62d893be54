from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.cli.main import app
from unisono.selection import Measured, table_path


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_measures_prints_and_keeps() -> None:
    result = _tune("broadcast", "-n", "2", "--bytes", "64,4KiB", "--algorithms", "default,tree,chain")
    assert result.exit_code == 0, result.stderr
    assert "broadcast over 2 ranks, measured" in result.stdout
    assert result.stdout.rstrip().endswith(f"kept in {table_path()}")
    table = Measured.load()
    assert table.algorithms("broadcast", 2) == ["chain", "default", "tree"]
    assert len(table) == 6
    assert all(0 < row.seconds < 10 for row in table.rows)
    again = CliRunner().invoke(app, ["plan", "broadcast", "-n", "2", "--bytes", "64"])
    assert "as measured here" in again.stdout


def test_keeps_nothing_if_asked_so() -> None:
    result = _tune("barrier", "-n", "2", "--algorithms", "default", "--no-keep")
    assert result.exit_code == 0, result.stderr
    assert not table_path().exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown collective 'nope'"),
        (["all_reduce", "-n", "0"], "--ranks is 0, expected 1 or more"),
        (["all_reduce", "--bytes", "1,x"], "'x' is not a size"),
        (["all_reduce", "--bytes", "0"], "tune measures sizes of 1 byte or more, got 0"),
        (["all_reduce", "--algorithms", "in_network"], "no algorithm 'in_network' can run all_reduce"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _tune(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
