"""Records of a made-up program of two ranks, for tests: rank 1 comes 400 ns late to a call of 1000 ns."""

import atexit
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.backend.device_calls import DeviceCalls, LaunchedWork
from unisono.backend.device_group import TwoDeviceGroup
from unisono.backend.group import Group
from unisono.backend.inner import Inner
from unisono.backend.process_group import UnisonoProcessGroup
from unisono.backend.work import PendingWork
from unisono.runtime.queue import CallQueue
from unisono.runtime.reduce import Reducer
from unisono.trace.collect import Collector
from unisono.trace.record import RankRecord, read

MAIN = 7
WRAPPED = (
    UnisonoProcessGroup, PendingWork, Group, Reducer, CallQueue, TwoDeviceGroup, DeviceCalls, LaunchedWork, Inner,
)  # fmt: skip


@contextmanager
def collecting(folder: str | Path, compute: bool = False) -> Iterator[Collector]:
    """A collector of this process that ends with the block, while those of programs end with their process."""
    collector, before = Collector(Path(folder), compute), [dict(vars(owner)) for owner in WRAPPED]
    collector.start()
    try:
        yield collector
    finally:
        for owner, old in zip(WRAPPED, before, strict=True):
            for name in [name for name, value in vars(owner).items() if value is not old.get(name)]:
                setattr(owner, name, old[name])
        atexit.unregister(collector.write)
        if signal.getsignal(signal.SIGTERM) == collector._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def call(number: int, begin: int, end: int, **other: Any) -> dict[str, Any]:
    words = "all_reduce(float32 [256], SUM)"
    plain = {"op": "all_reduce", "nbytes": 1024, "words": words, "message": ""}
    where = {
        "memory": "abc",
        "group": "the default group",
        "ranks": [0, 1],
        "number": number,
        "begin": begin,
        "end": end,
    }
    return {**plain, **where, **other}


def write(folder: Path, rank: int, **other: Any) -> None:
    data = {
        "rank": rank, "pid": 100 + rank, "host": "here", "program": "train.py --lr <1>", "clock": 10**18, "main": MAIN,
        "since": 0, "groups": {"abc": [0, 1]}, "calls": [], "spans": [], "reductions": [],
        "marks": [], "offset": 0, "device_calls": [], **other,
    }  # fmt: skip
    (folder / f"rank-{rank}-{data['pid']}.json").write_text(json.dumps(data))


def read_one(folder: Path) -> list[RankRecord]:
    """The ranks of the only launch."""
    (records,) = read(folder)
    return records


def two_ranks(folder: Path) -> None:
    """Call 1 is synchronous; call 2 is asynchronous, issued by both at once and hidden but for a wait of 100 ns."""
    second = [call(2, 3000, 5000)]
    waits = ["wait", 4900, 5000, MAIN, "train.py:9 in step"]
    issues = ["allreduce", 2990, 3010, MAIN, "train.py:8 in step"]
    write(
        folder,
        0,
        calls=[call(1, 1000, 2000), *second],
        spans=[["allreduce", 990, 2010, MAIN, "train.py:5 in step"], issues, waits],
        reductions=[[1600, 1900]],
    )
    write(
        folder,
        1,
        calls=[call(1, 1400, 2000), *second],
        spans=[["allreduce", 1390, 2010, MAIN, "train.py:5 in step"], issues, waits],
        reductions=[[1300, 1700], [4000, 4500]],
    )
