"""The guard of calls on GPUs, which needs no GPU: headers in shared memory, compared without a wait."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backend.test_hosts import on_hosts
from hangs.job import Fault, Job, attempt, init
from ranks import ranks
from unisono.errors import CollectiveTimeout, MismatchError, UnisonoError
from unisono.runtime.call import Call
from unisono.watch.status import snapshot


def guard() -> Any:
    group: Any = dist.group.WORLD
    return group._group.device_guard


def issue(made: Call) -> None:
    guard().issued(made, guard().header(made))


def call(numel: int, op: str = "SUM") -> Call:
    return Call("all_reduce", torch.float32, (numel,), op)


def equal_calls(rank: int, world_size: int, patience: float = 0.0) -> int:
    """``patience``: seconds that headers may take to come from other hosts."""
    for k in range(300):  # more than are kept; ranks drift apart
        issue(call(k % 7))
        if k % 100 == 60 + rank:
            time.sleep(0.02)
    dist.barrier()
    guard().compare()
    deadline = time.monotonic() + patience
    while True:
        try:
            guard().check(0.0)
            return int(guard().number)
        except CollectiveTimeout:
            if time.monotonic() > deadline:
                raise


def other_call(rank: int, world_size: int, early: bool) -> tuple[str, str]:
    """The first error of a rank and when it came: at its call, or later, when it looks."""
    for _ in range(3):
        issue(call(4))
    dist.barrier()
    first = (rank != 1) if early else (rank == 1)
    found = ("", "")
    for now in (True, False):
        if first == now:
            try:
                issue(call(5, "MAX" if rank == 1 else "SUM"))
            except MismatchError as error:
                found = ("at the call", str(error))
        dist.barrier()
    if not found[0]:
        try:
            guard().check(10.0)
        except MismatchError as error:
            found = ("later", str(error))
    dist.barrier()
    return found


def missed(rank: int, world_size: int) -> str:
    """Rank 1 leaves a call out and makes many others: its headers are gone when the others compare."""
    shapes = [k % 5 for k in range(400)]
    if rank == 1:
        del shapes[100]
        for numel in shapes:
            issue(call(numel))
    dist.barrier()
    try:
        if rank != 1:
            for numel in shapes[: len(shapes) - 1]:
                issue(call(numel))
        dist.barrier()
        guard().compare()
    except MismatchError as error:
        dist.barrier() if rank != 1 else None
        return str(error)
    return ""


def late(rank: int, world_size: int) -> str:
    if rank != 2:
        issue(call(4))
    dist.barrier()
    try:
        guard().check(30.0)
        time.sleep(0.05)
        guard().check(0.01)
    except UnisonoError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return ""


def over_hosts(rank: int, world_size: int, meeting: str) -> tuple[int, str, str]:
    """Three ranks on two hosts: equal calls; then rank 2, alone on its host, is late; then it calls something else."""
    with on_hosts(rank, (2, 1)):
        init(meeting, rank, world_size)
        equal = equal_calls(rank, world_size, 10.0)
        lateness = late(rank, world_size)
        if rank == 2:
            issue(call(4))
        dist.barrier()
        fault = attempt(lambda: issue(call(5, "MAX" if rank == 2 else "SUM")))
        deadline = time.monotonic() + 5.0
        while not fault.kind and time.monotonic() < deadline:
            time.sleep(0.01)
            fault = attempt(lambda: guard().check(10.0))
        dist.barrier()
        dist.destroy_process_group()
    return equal, lateness, f"{fault.kind}: {fault.text}"


def test_calls_of_ranks_on_several_hosts_are_compared(tmp_path: Path) -> None:
    found = ranks(3, group=False).run(over_hosts, str(tmp_path / "meeting"))
    for rank, (equal, lateness, words) in enumerate(found):
        assert equal == 300
        assert ("rank 2 missing (arrived: 0, 1)" in lateness) == (rank != 2)
        assert words.startswith("MismatchError: the ranks of the default group disagree about call no. 302 on GPUs")
        assert "all_reduce(float32 [5], MAX)" in words


def test_a_lost_rank_of_another_host_is_named(tmp_path: Path) -> None:
    with Job(loses_rank_2, 3, f"{tmp_path}/meeting", group=False) as job:
        first, second, _ = job.results()
    for fault in (first, second):
        fault.says(
            "PeerLostError", r"call no. 2 of the default group on GPUs, can not end", r"rank 2 \(pid \d+ on host1\)"
        )


def loses_rank_2(rank: int, world_size: int, meeting: str) -> Fault:
    with on_hosts(rank, (2, 1)):
        init(meeting, rank, world_size)
        issue(call(4))
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        issue(call(4))
        found = attempt(lambda: None)
        while not found.kind:
            time.sleep(0.05)
            found = attempt(lambda: guard().check(20.0))
        return found


def fresh(n: int, fn: Any, *args: Any) -> list[Any]:
    """On a default group of its own, whose guard has counted nothing."""
    ranks(n, group=False).run(torch_free)
    return ranks(n).run(fn, *args)


def torch_free(rank: int, world_size: int) -> None:
    """Between two groups."""


def test_equal_calls_pass() -> None:
    assert fresh(3, equal_calls) == [300] * 3


@pytest.mark.parametrize("early", [True, False])
def test_who_comes_later_raises_at_its_call_and_the_others_when_they_look(early: bool) -> None:
    found = fresh(3, other_call, early)
    for rank, (when, words) in enumerate(found):
        assert when == ("later" if (rank != 1) == early else "at the call")
        assert "the ranks of the default group disagree about call no. 4 on GPUs" in words
        assert "all_reduce(float32 [5], MAX)" in words
        assert "-> rank 1: " in words
        assert "the group can only be destroyed" in words


def issues_and_sleeps(rank: int, world_size: int) -> None:
    for k in range(70 + rank):  # more than headers are kept
        issue(call(k))
    time.sleep(60)


def test_ps_shows_the_last_call_on_gpus() -> None:
    found, end = [], time.monotonic() + 20
    with Job(issues_and_sleeps, 2) as job:
        while found != [70, 71] and time.monotonic() < end:
            jobs = snapshot(job.pid(0))
            found = [rank.gpu_number for each in jobs for rank in each.ranks]
            time.sleep(0.02)
        shown = [(rank.gpu_call, rank.gpu_group) for rank in jobs[0].ranks]
    assert found == [70, 71]
    assert shown == [(f"all_reduce(float32 [{k}], SUM)", "the default group") for k in (69, 70)]


def test_a_call_left_out_long_ago_is_found() -> None:
    found = fresh(3, missed)
    assert "disagree about call no." in found[0]
    assert "disagree about call no." in found[2]


def test_a_late_rank_is_named() -> None:
    found = fresh(3, late)
    assert found[2] == ""
    for words in found[:2]:
        assert words.startswith(
            "CollectiveTimeout: all_reduce(float32 [4], SUM), call no. 1 of the default group on GPUs"
        )
        assert "rank 2 missing (arrived: 0, 1)" in words
