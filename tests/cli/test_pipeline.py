"""Pipeline schedules take the same commands as schedules of collectives."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.algorithms import build
from unisono.algorithms.pipelines import SCHEDULES
from unisono.cli.main import app
from unisono.drawing import draw
from unisono.schedule import PipelineSchedule


def _run(*arguments: str, stdin: str | None = None, columns: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments), input=stdin)


def test_draw_shows_who_works_when() -> None:
    result = _run("draw", "1f1b", "-n", "2", "--microbatches", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "1f1b · 2 stages · 2 microbatches · bubble 33.3%",
        "",
        "rank 0  0F0━━0F1━━··········0BW0━━━━━━·····0BW1━━━━━━",
        "rank 1  ·····1F0━━1BW0━━━━━━1F1━━1BW1━━━━━━··········",
        "        0                                           9",
        "",
        "stage, kind, microbatch, F forward, BW both gradients, · idle",
    ]


def test_a_narrow_terminal_gets_a_narrow_chart() -> None:
    lines = _run("draw", "zb-v", columns=80).stdout.splitlines()
    assert [len(line) for line in lines[2:6]] == [80] * 4


def test_simulate_tells_the_bubble_the_formula_and_memory() -> None:
    assert _run("simulate", "1f1b", "-n", "2", "-m", "2").stdout.splitlines() == [
        "1f1b: 2 stages on 2 ranks, 2 microbatches",
        "bubble 33.33%, by the formula 33.33%; time 9; 4 messages",
        "microbatches in flight on each rank: 2, 1",
    ]


def test_times_are_those_of_a_ranks_share() -> None:
    result = _run("simulate", "interleaved", "--times", "2,2,2")
    assert "bubble 15.79%, by the formula 15.79%; time 57; 112 messages" in result.stdout
    result = _run("simulate", "interleaved", "-n", "4", "--per-rank", "3", "--link", "0.5")
    assert "12 stages on 4 ranks" in result.stdout
    assert "by the formula -;" in result.stdout
    assert "bubble 0.0%" in _run("draw", "zb-v", "--times", "1,1,1").stdout
    assert "bubble 0.0%" not in _run("draw", "zb-v", "--times", "1,2,1").stdout


ROWS = {
    "zb-v": ["8", "0.00%", "0.00%", "25.5", "96", "4"],
    "zb-h1": ["4", "11.11%", "11.11%", "27", "48", "4"],
    "interleaved": ["8", "15.79%", "15.79%", "28.5", "112", "5.5"],
    "1f1b": ["4", "27.27%", "27.27%", "33", "48", "4"],
    "gpipe": ["4", "27.27%", "27.27%", "33", "48", "8"],
}


@pytest.mark.parametrize(
    "command", [("plan", "pipeline", "-n", "4", "-m", "8"), ("simulate", "--compare", ",".join(ROWS))]
)
def test_plan_and_compare_show_all_schedules_the_fastest_first(command: tuple[str, ...]) -> None:
    lines = _run(*command).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [[name, *numbers] for name, numbers in ROWS.items()]


def test_list_has_them_too() -> None:
    lines = _run("list", "pipeline").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:7]] == list(SCHEDULES)
    assert "pipeline" in _run("list").stdout.splitlines()


def test_text_and_json_go_out_and_come_in(tmp_path: Path) -> None:
    given = ("zb-h1", "-n", "3", "-m", "4")
    out = _run("draw", *given, "--text").stdout
    schedule = build("zb-h1", "pipeline", 3, microbatches=4)
    assert PipelineSchedule.from_text(out) == schedule
    (tmp_path / "mine.txt").write_text(out)
    (tmp_path / "mine.json").write_text(json.dumps(schedule.to_json()))
    for command in ("draw", "simulate", "verify"):
        whole = _run(command, *given).stdout
        assert _run(command, str(tmp_path / "mine.txt")).stdout == whole
        assert _run(command, str(tmp_path / "mine.json")).stdout == whole
        assert _run(command, "-", stdin=out).stdout == whole


def test_verify_says_right_or_shows_what_is_wrong() -> None:
    assert _run("verify", "zb-v").stdout == "zb-v pipeline, 8 stages on 4 ranks, 8 microbatches: correct\n"
    text = build("1f1b", "pipeline", 2, microbatches=2).to_text().replace("1F1 1BW1", "1BW1 1F1")
    result = _run("verify", "-", stdin=text)
    assert result.exit_code == 1
    assert "order: rank 1, action 2: 1B1 comes before 1F1, which it needs" in result.stdout
    assert result.stdout.splitlines()[-1].strip() == "^^^^"


def test_writes_pictures_and_traces(tmp_path: Path) -> None:
    schedule = build("1f1b", "pipeline", 4)
    for form in ("svg", "gantt", "trace"):
        file = tmp_path / form
        assert _run("draw", "1f1b", f"--{form}", str(file)).stdout == f"wrote {file}\n"
        assert file.read_text() == str(draw(schedule, form))
        assert _run("draw", "1f1b", f"--{form}", "-").stdout.strip() == file.read_text().strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "2f2b"], f"of pipelines {', '.join(SCHEDULES)}"),
        (["draw", "1f1b", "-n", "0"], "at least one rank, got 0"),
        (["draw", "1f1b", "-m", "0"], "at least one microbatch, got 0"),
        (["draw", "1f1b", "--per-rank", "2"], "1f1b has 1 stage on a rank, not 2: use interleaved"),
        (["draw", "1f1b", "--chunks", "2"], "--chunks is of collectives, and 1f1b is a pipeline schedule"),
        (["draw", "1f1b", "all_reduce"], "1f1b is a pipeline schedule: leave all_reduce out"),
        (["draw", "ring", "-m", "2"], "--microbatches is of pipelines, and ring is an algorithm: leave it out"),
        (["draw", "default", "-m", "2"], "--microbatches is of pipelines: leave it out"),
        (
            ["draw", "1f1b", "--style", "rows"],
            "--style is of collectives, and 1f1b is a pipeline schedule: leave it out",
        ),
        (["draw", "zb-v", "--topology", "pcie"], "--topology is of collectives, and zb-v is a pipeline schedule"),
        (["draw", "zb-v", "--timeline", "--bytes", "4"], "--bytes is of collectives, and zb-v is a pipeline schedule"),
        (["draw", "ring", "--times", "1,1,1"], "--times is of pipelines: leave it out"),
        (["draw", "1f1b", "--html", "x.html"], "draw a timeline or a pipeline as svg"),
        (["draw", "1f1b", "--program"], "1f1b is a pipeline schedule, which has no programs"),
        (["verify", "1f1b", "--program"], "1f1b is a pipeline schedule, which has no programs"),
        (["verify", "1f1b", "--in-place"], "in_flight and in_place are for collectives"),
        (["draw", "-", "-m", "2"], "has its own collective and numbers: leave --microbatches out"),
        (["draw", "-"], "standard input: empty schedule"),
        (["draw", "1f1b", "--svg", "/nowhere/x.svg"], "cannot write /nowhere/x.svg"),
        (["plan", "pipeline", "--topology", "pcie"], "--topology is of collectives: leave it out"),
        (["plan", "pipeline", "--oversubscribed"], "--oversubscribed is of collectives: leave it out"),
        (["plan", "all_reduce", "-m", "2"], "--microbatches is of pipelines: leave it out"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str) -> None:
    result = _run(*arguments, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
