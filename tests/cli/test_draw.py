import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from unisono.algorithms import build
from unisono.cli.main import app
from unisono.drawing import draw
from unisono.program import Program, bind, lower
from unisono.program.defaults import DIRECT_MOVED
from unisono.schedule import Schedule, preset
from unisono.simulation import simulate
from unisono.transport.layout import Layout

COMMAND = [sys.executable, "-m", "unisono.cli", "draw"]


def _draw(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["draw", *arguments], input=stdin, env={"COLUMNS": "80"})


def test_the_grid_is_the_default() -> None:
    result = _draw("ring", "all_gather", "-n", "3", "--width", "80")
    assert result.exit_code == 0
    assert result.stdout == f"{draw(build('ring', 'all_gather', 3))}\n"


def test_all_reduce_over_four_ranks_is_what_nobody_asked_for() -> None:
    assert _draw("ring").stdout == _draw("ring", "all_reduce", "-n", "4").stdout != ""


def test_the_text_form_reads_back() -> None:
    result = _draw("tree", "broadcast", "-n", "5", "--root", "2", "--chunks", "3", "--text")
    assert Schedule.from_text(result.stdout) == build("tree", "broadcast", 5, 2, 3)


def test_a_file_and_standard_input_are_drawn_like_the_algorithm(tmp_path: Path) -> None:
    schedule = build("double_tree", "all_reduce", 4)
    (tmp_path / "mine.txt").write_text(schedule.to_text())
    (tmp_path / "mine.json").write_text(json.dumps(schedule.to_json()))
    expected = f"{draw(schedule)}\n"
    assert _draw(str(tmp_path / "mine.txt"), "--width", "80").stdout == expected
    assert _draw(str(tmp_path / "mine.json"), "--width", "80").stdout == expected
    assert _draw("-", "--width", "80", stdin=schedule.to_text()).stdout == expected


def test_pictures_are_written(tmp_path: Path) -> None:
    schedule = build("ring", "all_reduce", 4)
    run = simulate(schedule, preset("ethernet", 4), 4096)
    for option, extra, expected in (
        ("--svg", [], str(draw(schedule, "svg"))),
        ("--svg", ["--style", "rows"], str(draw(schedule, "svg", style="rows"))),
        ("--html", [], str(draw(schedule, "html"))),
        ("--gantt", ["--topology", "ethernet", "--bytes", "4KiB"], str(draw(run, "gantt"))),
        ("--trace", ["--topology", "ethernet", "--bytes", "4KiB"], str(draw(run, "trace"))),
    ):
        file = tmp_path / f"picture{option}"
        result = _draw("ring", option, str(file), *extra)
        assert (result.exit_code, result.stdout) == (0, f"wrote {file}\n")
        assert file.read_text(encoding="utf-8") == expected


def test_a_dash_writes_the_picture_to_standard_output() -> None:
    assert ElementTree.fromstring(_draw("ring", "--svg", "-").stdout).tag.endswith("svg")


def test_the_timeline_is_printed() -> None:
    result = _draw("ring", "--timeline", "--topology", "pcie", "--bytes", "64KiB", "--width", "80")
    assert result.stdout == f"{draw(simulate(build('ring', 'all_reduce', 4), preset('pcie', 4), 65536))}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rong"], "no algorithm and no file is called 'rong': the algorithms are bidirectional_ring, bruck"),
        (["ring", "all_stars"], "unknown collective 'all_stars'"),
        (["ring", "gather"], "algorithm ring has no gather"),
        (["ring", "-n", "0"], "world_size must be at least 1, got 0"),
        (["ring", "-n", "four"], "Invalid value for '--ranks'"),
        (["ring", "--root", "1"], "ring all_reduce has no root, got root=1"),
        (["ring", "--chunks", "0"], "chunks must be at least 1, got 0"),
        (["tree", "broadcast", "--root", "4"], "there is no rank 4 among 4"),
        (["ring", "--style", "square", "--svg", "x.svg"], "unknown style 'square'"),
        (["ring", "-n", "100", "--svg", "x.svg"], "up to 64"),
        (["ring", "-n", "100", "--html", "x.html"], "too large for a page"),
        (["ring", "--timeline", "--topology", "string"], "unknown topology 'string'"),
        (["ring", "--timeline", "--bytes", "many"], "'many' is not a size"),
        (["ring", "--svg", "missing/x.svg"], "cannot write missing/x.svg: No such file or directory"),
        (["ring", "-n", "24576", "--text"], "more than 2,000,000 transfers"),
        (["ring", "--width", "0"], "Invalid value for '--width'"),
        (["-", "-n", "4"], "the schedule in standard input has its own collective and numbers: leave --ranks out"),
        (["/dev/null"], "/dev/null: empty schedule"),
        (["/"], "cannot read /: Is a directory"),
        ([], "Missing argument 'NAME|FILE'. See `unisono draw --help`."),
        (["ring", "--style", "rows"], "--style is of the picture: give --svg as well"),
        (["ring", "--topology", "pcie"], "--topology is of the timeline: give --timeline, --gantt or --trace as well"),
        (["ring", "--bytes", "4"], "--bytes is of the timeline: give --timeline, --gantt or --trace as well"),
        (["default", "--topology", "pcie"], "--topology is of the timeline"),
        (["ring", "--program", "--topology", "pcie"], "--topology is of a schedule, and --program draws text"),
        (["default", "--chunks", "2"], "the table of defaults has its own number of chunks: leave --chunks out"),
        (["default", "all_stars"], "unknown collective 'all_stars': expected one of all_reduce, "),
        (["default", "--bytes", "many"], "'many' is not a size"),
        (["ring", "--placement", "staged"], "--placement is of the programs: give --program as well"),
        (["ring", "--rank", "0"], "--rank is of the programs"),
        (["ring", "--bound"], "--bound is of the programs"),
        (["ring", "--program", "--svg", "x.svg"], "--svg is of a schedule, and --program draws text"),
        (["ring", "--program", "--timeline"], "--timeline is of a schedule, and --program draws text"),
        (["ring", "--program", "--text", "--bound"], "--text is the form that has no sizes: leave --bound out"),
        (["ring", "--program", "--rank", "4"], "ring all_reduce over 4 ranks has no rank 4"),
        (["ring", "--program", "-n", "65"], "programs of up to 64 are shown at once: name one with --rank"),
        (["ring", "--program", "--placement", "here"], "unknown placement 'here': expected one of staged, mailbox, "),
        (["ring", "--program", "--placement", "mailbox"], "has no sum that could be pushed: staged"),
        (["ring", "--program", "--placement", "messages", "--bound"], "ring all_reduce by messages has no table"),
        (["in_network", "--program"], "in_network all_reduce needs a switch that sums"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = _draw(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("unisono: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("schedule", "standard input: line 1: expected 'schedule NAME"),
        ("schedule x all_reduce ranks=2 chunks=1\nstep 0: 0>1", "standard input: line 2: expected a transfer"),
        ("schedule x all_reduce ranks=2 chunks=1\nstep 0: 0>99999999999 c0 +", "32 bits"),
        ("{", "cannot be read as a schedule"),
        ("{}", "not a schedule in JSON"),
        (
            '{"schedule": "x", "collective": "all_reduce", "ranks": 2, "chunks": 1, "steps": [[["a", 1, 0]]]}',
            "schedule",
        ),
        (f"schedule x all_reduce ranks={'9' * 5000} chunks=1", "cannot be read as a schedule"),
    ],
)
def test_what_is_no_schedule_is_one_line_and_exit_code_2(content: str, words: str) -> None:
    result = _draw("-", stdin=content)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_bytes_that_are_no_text_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00")
    result = _draw(str(tmp_path / "noise"))
    assert result.exit_code == 2
    assert "is not text (UTF-8)" in result.stderr


def test_a_terminal_that_lacks_the_signs_shows_question_marks() -> None:
    result = subprocess.run(
        [*COMMAND, "ring"], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=100
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"ring all_reduce ? 4 ranks" in result.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [*COMMAND, "ring", "-n", "16"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100
        )
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("nbytes", "name"), [("1KiB", "one_shot"), ("1MiB", "two_phase")])
def test_default_is_what_the_table_names_for_the_size(nbytes: str, name: str) -> None:
    schedule = build(name, "all_reduce", 4)
    given = ("default", "all_reduce", "-n", "4", "--bytes", nbytes)
    assert _draw(*given, "--width", "80").stdout == f"{draw(schedule)}\n"
    assert Schedule.from_text(_draw(*given, "--text").stdout) == schedule
    assert _draw(*given, "--svg", "-").stdout == str(draw(schedule, "svg"))


def test_programs_are_drawn_as_the_backend_places_them() -> None:
    for name, placement in (("ring", "staged"), ("two_phase", "mailbox"), ("default", "mailbox")):
        schedule = build(name if name != "default" else "two_phase", "all_reduce", 4)
        expected = draw([lower(schedule, rank, placement) for rank in range(4)])
        assert _draw(name, "--program", "--width", "80").stdout == f"{expected}\n"


def test_one_rank_and_another_placement() -> None:
    expected = draw([lower(build("two_phase", "all_reduce", 4), 2, "direct")])
    assert _draw("default", "--program", "--rank", "2", "--placement", "direct").stdout == f"{expected}\n"


def test_the_text_form_of_programs_reads_back() -> None:
    schedule = build("double_tree", "broadcast", 5, 2)
    texts = _draw("double_tree", "broadcast", "-n", "5", "--root", "2", "--program", "--text").stdout.split("\n\n")
    assert [Program.from_text(text).to_text() for text in texts] == [lower(schedule, r).to_text() for r in range(5)]


def test_programs_are_bound_to_bytes_that_are_given() -> None:
    program = lower(build("two_phase", "all_reduce", 4), 1, "mailbox")
    table = bind(program, [3 << 20], area=Layout(4).stage)
    given = ("default", "--program", "--rank", "1", "--bytes", "3MiB")
    assert _draw(*given).stdout == f"{table.to_text()}\n"
    assert _draw(*given, "--no-bound").stdout == f"{draw([program])}\n"
    assert _draw(*given, "--text").stdout == program.to_text()
    assert _draw("ring", "--program", "--bound").stdout == _draw("ring", "--program", "--bytes", "1MiB").stdout


def test_tables_between_shared_tensors_move_more_at_once() -> None:
    program = lower(build("direct", "all_gather", 2), 0, "direct")
    table = bind(program, [8 << 20] * 2, area=DIRECT_MOVED)
    given = (
        "default",
        "all_gather",
        "-n",
        "2",
        "--program",
        "--placement",
        "direct",
        "--bytes",
        "16MiB",
        "--rank",
        "0",
    )
    assert _draw(*given).stdout == f"{table.to_text()}\n"


def test_one_rank_alone_is_drawn_too() -> None:
    for collective in ("all_reduce", "reduce", "broadcast"):
        result = _draw("default", collective, "-n", "1", "--program")
        assert (result.exit_code, result.stderr) == (0, "")
        assert "· staged · rank 0 of 1 ·" in result.stdout
