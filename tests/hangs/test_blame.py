"""Whom launchers blame: the rank that failed first, not one that failed over its loss and was quicker to end.

The rank to blame is the last one, for launchers take the first of several that have failed alike. It takes long to end,
or torchrun is slow to look.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import record

import agents
from hangs.job import Job, init
from ranks import FORKS

GUILTY = 2


def bad_sample() -> None:
    """Fails, and cleans up before the error gets anywhere."""
    try:
        raise ValueError("bad sample 17")
    finally:
        dist.destroy_process_group()
        time.sleep(0.4)


def in_thread() -> None:
    """A thread fails; the main thread then ends the program."""
    thread = threading.Thread(target=bad_sample)
    thread.start()
    thread.join()
    sys.exit(4)


WAYS: dict[str, Callable[[], Any]] = {
    "raise": bad_sample,
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "thread": in_thread,
}
CODES = {"raise": 1, "exit": 3, "_exit": 3, "kill": -9, "thread": 4}


def victim(how: str) -> None:
    """Communicates until a peer is lost, and ends over it."""
    x = torch.ones(10)
    try:
        while True:
            dist.all_reduce(x)
    except RuntimeError as error:
        if how == "exit":
            sys.exit(1)
        if how == "translate":
            raise KeyError("training failed") from error
        raise


def job(way: str, how: str) -> None:
    """One rank of a job."""
    dist.barrier()
    if dist.get_rank() == GUILTY:
        WAYS[way]()
    victim(how)


def main() -> None:
    """One rank: how the guilty and the others end, and whether torch records it."""
    way, how, recorded = sys.argv[1:]

    def run() -> None:
        dist.init_process_group("unisono")
        job(way, how)

    (record(run) if recorded == "record" else run)()


def blamed(printed: str) -> tuple[int, int]:
    """The rank and the exit code that torchrun calls the root cause."""
    cause = printed[printed.index("Root Cause") :]
    rank, code = re.search(r"rank +: (\d+)", cause), re.search(r"exitcode +: (-?\d+)", cause)
    assert rank is not None
    assert code is not None
    return int(rank[1]), int(code[1])


CASES = [("raise", "raise", "record"), ("kill", "exit", "plain"), ("thread", "raise", "record")]
OTHERS = [(way, "raise", recorded) for way in WAYS for recorded in ("record", "plain")] + [
    ("kill", "translate", "record")
]
SOAKED = [pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS if case not in CASES]


@pytest.mark.parametrize(("way", "how", "recorded"), [*CASES, *SOAKED])
def test_torchrun(way: str, how: str, recorded: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    options = "--standalone --nproc-per-node 3 --monitor-interval 0.7"
    agent = agents.start(
        f"{options} {__file__} {way} {how} {recorded}", tmp_path / "printed", environment={"PYTHONPATH": path}
    )
    assert agents.end(agent) == 1
    printed = (tmp_path / "printed").read_text()
    assert blamed(printed) == (GUILTY, CODES[way]), printed
    if (way, recorded) == ("raise", "record"):
        assert "bad sample 17" in printed[printed.index("Root Cause") :]


def spawned(rank: int, meeting: str, way: str) -> None:
    """One rank under torch.multiprocessing."""
    init(meeting, rank, 3)
    job(way, "raise")


def launch(start: str, meeting: str, way: str) -> tuple[int, str]:
    """Which rank torch.multiprocessing blames, in the words of its error; the launcher is a process with one thread."""
    try:
        mp.start_processes(spawned, (meeting, way), 3, start_method=start)
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        return error.error_index, str(error)
    raise AssertionError("no rank has failed")


STARTS = [("raise", "fork"), ("exit", "fork"), ("kill", "fork")]
OTHER_STARTS = [(way, start) for way in ("raise", "exit", "kill") for start in ("spawn", "fork")]
SOAKED_STARTS = [pytest.param(*case, marks=pytest.mark.soak) for case in OTHER_STARTS if case not in STARTS]


@pytest.mark.parametrize(("way", "start"), [*STARTS, *SOAKED_STARTS])
def test_torch_multiprocessing(way: str, start: str, tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, FORKS) as pool:
        rank, words = pool.submit(launch, start, str(tmp_path / "meeting"), way).result(60)
    assert rank == GUILTY, words
    assert {"raise": "bad sample 17", "exit": "exit code 3", "kill": "SIGKILL"}[way] in words


def never(rank: int, world_size: int) -> None:
    raise AssertionError("every rank is a script")


def test_a_launcher_that_waits_in_order_is_not_kept() -> None:
    script = "from hangs.test_blame import job\njob('kill', 'raise')"
    with Job(never, 3, scripts=dict.fromkeys(range(3), script)) as launched:
        while psutil.Process(launched.pid(GUILTY)).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        start = time.monotonic()
        assert [launched.reap(rank) for rank in range(3)] == [1, 1, CODES["kill"]]
        assert 1.5 < time.monotonic() - start < 6
        assert "".join(map(launched.errors, range(3))).count("killed by SIGKILL") >= 2


if __name__ == "__main__":
    main()
