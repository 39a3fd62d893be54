import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.algorithms import build
from unisono.cli.main import app
from unisono.program import lower
from unisono.schedule import COLLECTIVES

UNISONO = [sys.executable, "-m", "unisono.cli"]


def _verify(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments], input=stdin)


def _broken_ring() -> str:
    return build("ring", "all_reduce", 4).to_text().replace("0>1 c3 +, ", "", 1)


def test_a_right_schedule_is_said_to_be_right() -> None:
    result = _verify("-", stdin=build("ring", "all_reduce", 4).to_text())
    assert result.exit_code == 0
    assert result.stdout.startswith("ring all_reduce over 4 ranks, 6 steps: correct")
    assert result.stdout.count("\n") == 1


def test_an_algorithm_is_proved_by_name() -> None:
    result = _verify("tree", "reduce", "-n", "7", "--root", "3", "--chunks", "2")
    assert (result.exit_code, result.stdout[:26]) == (0, "tree reduce over 7 ranks, ")


def test_a_wrong_schedule_shows_an_arrow_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "ring.txt").write_text(_broken_ring())
    result = _verify(str(tmp_path / "ring.txt"))
    assert result.exit_code == 1
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "ring all_reduce over 4 ranks, 6 steps: 1 finding"
    assert lines[2].startswith("lost: chunk 3: the contribution of rank 0 is missing at ranks 0-3")
    assert lines[-1].strip() == "^ 0 is overwritten"
    assert lines[-1].index("^") == lines[3].index("rank 0")


def test_long_lines_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert _verify("-", stdin=_broken_ring()).stdout.splitlines()[0].endswith("6 steps: 1 finding")


def test_messages_in_flight_decide_about_deadlock() -> None:
    assert _verify("ring", "--in-flight", "1").exit_code == 0
    result = _verify("ring", "--in-flight", "0")
    assert result.exit_code == 1
    assert "\ndeadlock: " in result.stdout


def test_in_place_is_asked_for() -> None:
    assert _verify("shift", "all_to_all").exit_code == 0
    result = _verify("shift", "all_to_all", "--in-place")
    assert result.exit_code == 1
    assert "\nin_place: " in result.stdout


def test_notes_are_asked_for() -> None:
    waste = "schedule waste broadcast ranks=2 chunks=1\nstep 0: 0>1 c0 =\nstep 1: 0>1 c0 =\n"
    assert "redundant: " not in _verify("-", stdin=waste).stdout
    result = _verify("-", "--notes", stdin=waste)
    assert result.exit_code == 0
    assert "\nredundant: step 1: chunk 0 is copied to rank 1, which holds just that already\n" in result.stdout


def test_a_pipe_from_draw() -> None:
    drawn = subprocess.Popen([*UNISONO, "draw", "ring", "all_reduce", "-n", "4", "--text"], stdout=subprocess.PIPE)
    proved = subprocess.run([*UNISONO, "verify", "-"], stdin=drawn.stdout, capture_output=True, text=True, timeout=100)
    assert drawn.stdout is not None
    drawn.stdout.close()
    assert (drawn.wait(100), proved.returncode, proved.stderr) == (0, 0, "")
    assert "correct" in proved.stdout


def test_a_reader_that_leaves_does_not_change_the_verdict() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [*UNISONO, "verify", "-"],
            input=_broken_ring(),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rong"], "no algorithm and no file is called 'rong'"),
        (["missing.txt"], "no algorithm and no file is called 'missing.txt'"),
        (["-"], "standard input: empty schedule"),
        (["ring", "--in-flight", "-1"], "in_flight must be at least 0, got -1"),
        (["ring", "-n", "2000"], "too large to prove"),
        (["/dev/null", "broadcast"], "leave COLLECTIVE out"),
        (["default", "--chunks", "2"], "leave --chunks out"),
        (
            ["default", "--bytes", "100GiB"],
            "rows to play, expected up to 500,000: prove a smaller size, or fewer ranks",
        ),
        (["ring", "--bytes", "4"], "--bytes is of what ranks execute: give --program as well"),
        (["in_network", "--program"], "in_network all_reduce needs a switch that sums"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = _verify(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_runs_by_default_is_proved_with_its_programs() -> None:
    result = _verify("default", "all_reduce", "-n", "4", "--bytes", "1MiB")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "two_phase all_reduce over 4 ranks, 2 steps: correct (needs 3 messages in flight per rank)",
        "two_phase all_reduce, mailbox, over 4 ranks, 1 piece: holds, 2 meetings, sums in rank order",
        "two_phase all_reduce, direct, over 4 ranks, 1 piece: holds, 2 meetings, sums in rank order",
    ]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_default_holds(collective: str, ranks: int) -> None:
    for nbytes in ("4", "4MiB"):
        result = _verify("default", collective, "-n", str(ranks), "--bytes", nbytes)
        assert (result.exit_code, result.stderr) == (0, ""), result.stdout


def test_programs_of_an_algorithm_are_asked_for() -> None:
    lines = _verify("ring", "-n", "3", "--program").stdout.splitlines()
    assert lines[1] == "ring all_reduce, staged, over 3 ranks, 1 piece: holds, 4 meetings, sums in one order"


def test_an_all_to_all_in_place_is_not_direct() -> None:
    result = _verify("default", "all_to_all", "-n", "2", "--bytes", "8MiB", "--in-place")
    assert (result.exit_code, "direct all_to_all, direct" in result.stdout) == (0, False)


def test_programs_in_text_are_proved() -> None:
    programs = [lower(build("ring", "all_reduce", 3), rank) for rank in range(3)]
    text = "\n".join(program.to_text() for program in programs)
    result = _verify("-", stdin=text)
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert "ring all_reduce, staged, over 3 ranks, 3 pieces: holds" in result.stdout
    spoilt = _verify("-", stdin=text.replace("copy c0 out[0] <- 0:stage[2]", "copy c0 out[0] <- 0:stage[1]"))
    assert spoilt.exit_code == 1
    assert "\nrace: rank 1, epoch 3, " in spoilt.stdout
    assert "^ race" in spoilt.stdout
    for broken, words in (
        (programs[0].to_text(), "a proof takes the tables of all ranks of one collective"),
        (text.replace("meet", "meat", 1), "standard input: line 3: expected 'step S: KIND ...'"),
    ):
        result = _verify("-", stdin=broken)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr


def test_the_order_of_sums_is_told_for_the_hosts_asked() -> None:
    lines = _verify("columns", "-n", "4", "--hosts", "2x2", "--order").stdout.splitlines()
    assert lines == [
        "columns all_reduce over 4 ranks, 3 steps: correct (needs 1 message in flight per rank)",
        "sums: 0+1+(2+3) for every element",
    ]
    assert "sums: in 4 orders" in _verify("ring", "-n", "4", "--order").stdout
    assert "leave --order out" in _verify("1f1b", "-n", "4", "--order").stderr
    assert "hosts 2x3 have 6 ranks, not 4" in _verify("ring", "-n", "4", "--hosts", "2x3").stderr


def test_programs_of_a_placement() -> None:
    result = _verify("ring", "all_reduce", "-n", "3", "--placement", "put")
    assert result.exit_code == 0
    assert "ring all_reduce, put, over 3 ranks" in result.output
    assert "unknown placement 'push'" in _verify("ring", "all_reduce", "-n", "3", "--placement", "push").output
    assert (
        "the table of defaults says how data moves"
        in _verify("default", "all_reduce", "-n", "3", "--placement", "put").output
    )
