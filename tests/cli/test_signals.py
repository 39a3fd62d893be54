"""What signals do to the commands that start ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

COMMANDS = {
    "train": "train --ranks 2 --width 16 --layers 1 --context 16 --batch 16 --steps 100000",
    "bench": "bench all_reduce --bytes 8 --seconds 100 --json bench.json",
}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def _members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _started(command: str, folder: Path) -> subprocess.Popen[str]:
    temporary = folder / "temporary"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "unisono.cli", *command.split()],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end_by(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, bool]:
    """Sends the signal; the exit code, 3 s later at most, what was printed as errors, whether no process was left."""
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=10)  # a loaded machine takes its time
    return process.returncode, errors, _until(lambda: not _members(process.pid), 3)


@pytest.mark.parametrize(
    ("members", "commands"),
    [
        pytest.param(2, ["bench", "train", "bench"], id="starting"),
        pytest.param(2, ["train", "bench", "train"], id="others starting", marks=pytest.mark.soak),
        pytest.param(5, ["train", "bench", "train"], id="running"),
    ],
)
def test_a_signal_ends_all_ranks_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, members: int, commands: list[str]
) -> None:
    """Three jobs start at once, for that takes time: launcher, resource tracker, fork server, two ranks each.

    Ranks are ended by code that both commands share.
    """
    folders = [tmp_path_factory.mktemp("job") for _ in CODES]  # short names: sockets are made in them
    jobs = [_started(COMMANDS[command], folder) for command, folder in zip(commands, folders, strict=True)]
    try:
        assert _until(lambda: all(len(_members(job.pid)) >= members for job in jobs), 90)
        for job in jobs[1:]:
            os.killpg(job.pid, signal.SIGSTOP)  # until it is their turn: else one ends beside two that start
        for (number, expected), job, folder in zip(CODES.items(), jobs, folders, strict=True):
            os.killpg(job.pid, signal.SIGCONT)
            code, errors, gone = _end_by(job, number)
            assert code == expected, errors
            assert "Traceback" not in errors
            assert gone
            assert number == signal.SIGKILL or not list((folder / "temporary").glob("unisono-*"))
    finally:
        for job in jobs:
            for member in _members(job.pid):
                os.kill(member, signal.SIGKILL)
            job.communicate()
