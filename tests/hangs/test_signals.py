"""Ctrl-C and SIGTERM end the ranks of a job under torchrun within 3 s, wherever they are, and leave no file.

torchrun gives its ranks a session of their own: a terminal's Ctrl-C reaches torchrun alone, which passes it on. Once
they are gone its own end is torch's affair. `unisono train` is held to the same in tests/cli/test_train.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SECONDS = 3.0
HEAD = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("unisono")
rank, x = dist.get_rank(), torch.ones(3_000_000)
dist.barrier()
open(f"{sys.argv[1]}/ready-{rank}", "w").close()
"""
PLACES = {
    "in a collective": "if rank == 2: time.sleep(100)\ndist.all_reduce(x)",
    "in a receive": "dist.recv(x, (rank + 1) % 3) if rank != 2 else time.sleep(100)",
    "in a wait": "w = [dist.all_reduce(x, async_op=True) for _ in range(3 * (rank != 2))]\n"
    "w[0].wait() if w else time.sleep(100)",
    "at work": "while True: dist.all_reduce(x)",
}


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
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A job of three ranks under torchrun, all at the place that the test names."""
    program, temporary = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text(HEAD + PLACES[request.param])
    temporary.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "errors", "wb") as errors:
        process = subprocess.Popen(
            [*torchrun, str(program), str(tmp_path)], env=environment, stderr=errors, start_new_session=True
        )
    try:
        ready = _until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, 60)
        assert ready, (tmp_path / "errors").read_text()
        time.sleep(0.5)
        yield process
    finally:
        for left in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            left.kill()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("started", "number"),
    [(place, signal.SIGINT) for place in PLACES] + [("in a collective", signal.SIGTERM)],
    indirect=["started"],
)
def test_a_signal_ends_every_rank(started: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals) -> None:
    ranks = psutil.Process(started.pid).children(recursive=True)
    shared = set(os.listdir("/dev/shm"))
    assert len(ranks) == 3
    started.send_signal(number)
    assert _until(lambda: not _living(ranks), SECONDS), (tmp_path / "errors").read_text()
    assert started.wait(10) != 0
    assert list((tmp_path / "temporary").rglob("*unisono*")) == []
    assert [name for name in set(os.listdir("/dev/shm")) - shared if "unisono" in name] == []
