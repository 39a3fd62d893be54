"""Ctrl-C and SIGTERM end the ranks of a job under torchrun within 3 s, wherever they are, and leave no file.

torchrun gives its ranks a session of their own: a terminal's Ctrl-C reaches torchrun alone, which passes it on. Once
they are gone its own end is torch's affair. `unisono train` is held to the same in tests/cli/test_train.py.
"""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

import agents

SECONDS = 3.0
HEAD = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("unisono")
rank, last, x = dist.get_rank(), dist.get_world_size() - 1, torch.ones(3_000_000)
pair = dist.new_group([3, 4]) if last > 4 else None
dist.barrier()
open(f"{sys.argv[1]}/ready-{rank}", "w").close()
"""
PLACES = """
if rank == last: time.sleep(100)  # all others but the pair wait for it
if rank == 0: dist.all_reduce(x)
if rank == 1: dist.recv(x, last)
if rank == 2: [dist.all_reduce(x, async_op=True) for _ in range(3)][0].wait()
while True: dist.all_reduce(x, group=pair)  # at work
"""


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _until(condition: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ForkServerProcess]:
    """A job of so many ranks under torchrun, each at its place."""
    program, temporary = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text(HEAD + PLACES)
    temporary.mkdir()
    command = f"--standalone --nproc-per-node {request.param} {program} {tmp_path}"
    process = agents.start(command, tmp_path / "errors", environment={"TMPDIR": str(temporary)})
    try:
        ready = _until(lambda: len(list(tmp_path.glob("ready-*"))) == request.param, 60)
        assert ready, (tmp_path / "errors").read_text()
        time.sleep(0.5)
        yield process
    finally:
        for left in psutil.Process(process.pid).children(recursive=True) if process.is_alive() else ():
            left.kill()
        process.kill()
        process.join()


@pytest.mark.parametrize(("started", "number"), [(6, signal.SIGINT), (2, signal.SIGTERM)], indirect=["started"])
def test_a_signal_ends_every_rank(started: ForkServerProcess, tmp_path: Path, number: signal.Signals) -> None:
    ranks = psutil.Process(started.pid).children(recursive=True)
    shared = set(os.listdir("/dev/shm"))
    assert len(ranks) == (6 if number == signal.SIGINT else 2)
    os.kill(started.pid, number)
    assert _until(lambda: not _living(ranks), SECONDS), (tmp_path / "errors").read_text()
    started.join(10)
    assert started.exitcode not in (0, None)
    assert list((tmp_path / "temporary").rglob("*unisono*")) == []
    assert [name for name in set(os.listdir("/dev/shm")) - shared if "unisono" in name] == []
