"""Records of a made-up program of two ranks, for tests: rank 1 comes 400 ns late to a call of 1000 ns."""

import json
from pathlib import Path
from typing import Any

from unisono.trace.record import RankRecord, read

MAIN = 7


def call(number: int, begin: int, end: int, **other: Any) -> dict[str, Any]:
    words = "all_reduce(float32 [256], SUM)"
    plain = {"op": "all_reduce", "nbytes": 1024, "words": words, "dtype": "float32", "message": ""}
    where = {
        "memory": "abc",
        "group": "the default group",
        "ranks": [0, 1],
        "number": number,
        "issued": begin,
        "ended": end,
    }
    return {**plain, **where, **other}


def write(folder: Path, rank: int, **other: Any) -> None:
    data = {
        "rank": rank, "pid": 100 + rank, "host": "here", "program": "train.py --lr <1>", "clock": 10**18, "main": MAIN,
        "since": 0, "groups": [["abc", "the default group", [0, 1]]], "calls": [], "spans": [], "reductions": [],
        "marks": [], "offset": 0, **other,
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
