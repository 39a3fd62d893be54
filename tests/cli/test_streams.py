"""What a command does where its streams are closed or full, and where numbers are beyond all bounds."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from unisono.cli import main

FULL = "unisono: cannot write: No space left on device\n"
CASES = [
    ("closed output", "list >&-", 0, ""),
    ("closed errors", "draw nosuch 2>&-", 2, ""),
    ("all closed", "draw nosuch <&- >&- 2>&-", 2, ""),
    ("closed input", "draw - <&-", 2, "unisono: cannot read standard input: it is closed\n"),
    ("full output", "draw ring >/dev/full", 2, FULL),
    ("full help", "--help >/dev/full", 2, FULL),
    ("one column", "draw ring -n 30 >/dev/null", 0, ""),
]


@pytest.mark.parametrize(("command", "code", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_streams(command: str, code: int, words: str) -> None:
    line = ["bash", "-c", f"exec {sys.executable} -m unisono.cli {command}"]
    done = subprocess.run(line, env=os.environ | {"COLUMNS": "1"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, words)


@pytest.mark.parametrize(
    "command",
    [
        "draw ring -n 99999999999999999999",
        "verify ring --chunks 99999999999999999999",
        "simulate 1f1b -m 99999999999999999999",
        "tune -n 99999999999",
        "train -n 99999999999 --batch 99999999999",
        "bench -n 99999999999",
    ],
)
def test_numbers_beyond_all_bounds(command: str) -> None:
    result = CliRunner().invoke(main.app, command.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("unisono: ")
    assert result.stderr.count("\n") == 1
