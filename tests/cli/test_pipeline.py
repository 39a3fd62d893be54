from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.algorithms.pipelines import SCHEDULES, build_pipeline
from unisono.cli.main import app


def _pipeline(*arguments: str, stdin: str | None = None, columns: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["pipeline", *arguments], input=stdin)


def test_shows_the_grid_the_bubble_the_formula_and_memory() -> None:
    result = _pipeline("1f1b", "--stages", "2", "--microbatches", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "1f1b: 2 stages on 2 ranks, 2 microbatches",
        "",
        "rank 0  0F0━━0F1━━··········0BW0━━━━━━·····0BW1━━━━━━",
        "rank 1  ·····1F0━━1BW0━━━━━━1F1━━1BW1━━━━━━··········",
        "",
        "stage, kind, microbatch, F forward, BW both gradients, · idle",
        "",
        "bubble 33.33%, by the formula 33.33%; time 9; 4 messages",
        "microbatches in flight on each rank: 2, 1",
    ]


def test_a_narrow_terminal_gets_a_narrow_grid() -> None:
    lines = _pipeline("zb-v", "--stages", "8", columns=80).stdout.splitlines()
    assert [len(line) for line in lines[2:6]] == [80] * 4


def test_times_are_those_of_a_ranks_share() -> None:
    result = _pipeline("interleaved", "--stages", "8", "--t-f", "2", "--t-b", "2", "--t-w", "2")
    assert "bubble 15.79%, by the formula 15.79%; time 57; 112 messages" in result.stdout
    result = _pipeline("interleaved", "-s", "12", "--per-rank", "3", "--link", "0.5")
    assert "on 4 ranks" in result.stdout
    assert "by the formula -;" in result.stdout


def test_compares_all_schedules_on_as_many_ranks() -> None:
    result = _pipeline("zb-v", "--stages", "8", "--microbatches", "8", "--compare")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert {row[0]: row[1:] for row in rows} == {
        "zb-v": ["8", "0.00%", "0.00%", "25.5", "96", "4", "1×"],
        "gpipe": ["4", "27.27%", "27.27%", "33", "48", "8", "2×"],
        "1f1b": ["4", "27.27%", "27.27%", "33", "48", "4", "1×"],
        "interleaved": ["8", "15.79%", "15.79%", "28.5", "112", "5.5", "1.38×"],
        "zb-h1": ["4", "11.11%", "11.11%", "27", "48", "4", "1×"],
    }


def test_text_goes_out_and_comes_in(tmp_path: Path) -> None:
    out = _pipeline("zb-h1", "-s", "3", "-m", "4", "--text").stdout
    assert out == str(build_pipeline("zb-h1", 3, 4))
    file = tmp_path / "mine.txt"
    file.write_text(out)
    whole = _pipeline("zb-h1", "-s", "3", "-m", "4").stdout
    assert _pipeline(str(file)).stdout == whole
    assert _pipeline("-", stdin=out).stdout == whole


def test_writes_svg(tmp_path: Path) -> None:
    file = tmp_path / "chart.svg"
    result = _pipeline("1f1b", "--svg", str(file))
    assert file.read_text().startswith("<svg")
    assert f"wrote {file}" in result.stdout
    assert _pipeline("1f1b", "--svg", "-").stdout == file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2f2b"], f"unknown pipeline schedule '2f2b': expected one of {', '.join(SCHEDULES)}"),
        (["zb-v", "-s", "3"], "3 stages do not divide into 2 on each rank: choose a multiple of 2"),
        (["1f1b", "-s", "0"], "a pipeline needs at least one stage, and one on each rank, got 0 and 1"),
        (["1f1b", "-m", "0"], "at least one of its microbatches, got 0"),
        (["1f1b", "--per-rank", "2"], "1f1b has 1 stage on a rank, not 2: use interleaved"),
        (["1f1b", "--t-f", "-1"], "forward must not be below zero"),
        (["-", "-s", "2"], "has its own numbers: leave --stages out"),
        (["-"], "empty schedule"),
        (["1f1b", "--svg", "/nowhere/x.svg"], "cannot write /nowhere/x.svg"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str) -> None:
    result = _pipeline(*arguments, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
