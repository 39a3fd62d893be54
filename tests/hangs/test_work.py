"""Where an error shows: at wait, in the future, at the next call; and what is left of a group that has failed."""

import datetime
import gc
import os
import signal
import threading
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, tell
from ranks import ranks
from unisono.transport.process import OwnThread

Usage = tuple[int, int, int, float]


def surfaces(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 is killed while the others hold works of several kinds."""
    dist.barrier()
    tell("ready")
    if rank == 1:
        time.sleep(60)
    works = [dist.all_reduce(torch.zeros(2), async_op=True) for _ in range(3)]
    recv = dist.irecv(torch.zeros(2), 1)
    assert recv is not None
    futures = [work.get_future() for work in works]
    seen: list[str] = []
    chained = futures[1].then(lambda f: seen.append(str(attempt(f.value).text)) or "gone on")
    start = time.monotonic()
    while not works[2].is_completed() and time.monotonic() < start + 5:
        time.sleep(0.002)
    polled = time.monotonic() - start
    found = {
        "wait": attempt(works[0].wait),
        "wait again": attempt(works[0].wait),
        "future": attempt(futures[1].wait),
        "chained": attempt(chained.wait),
        "recv": attempt(recv.wait),
        "polled": polled,
        "success": works[2].is_success(),
        "exception": type(works[2].exception()).__name__,
        "next": attempt(dist.barrier),
        "destroy": attempt(dist.destroy_process_group),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("unisono") and "watch" not in t.name],
    }
    found["seen"] = seen
    return found


def test_an_error_shows_everywhere() -> None:
    with Job(surfaces, 3) as job:
        job.hear("ready")
        time.sleep(0.2)
        pid = job.pid(1)
        job.signal(1, signal.SIGKILL)
        first, _, third = job.results(15)
    named = rf"rank 1 \(pid {pid} on "
    for found in (first, third):
        found["wait"].says("PeerLostError", "all_reduce", named)
        found["wait again"].says("PeerLostError", named)
        found["future"].says("RuntimeError", named)
        found["recv"].says("PeerLostError", "recv", named)
        found["next"].says("PeerLostError", "failed before and can only be destroyed", named)
        assert found["next"].seconds < 0.2
        assert found["chained"].text == "'gone on'"
        assert len(found["seen"]) == 1
        assert "rank 1" in found["seen"][0]
        assert found["polled"] < 1.5
        assert found["success"] is False
        assert found["exception"] == "PeerLostError"
        assert found["destroy"].kind == ""
        assert found["destroy"].seconds < 1.0
        assert found["threads"] == []


def usage() -> Usage:
    """Open descriptors, threads, mappings, resident MiB."""
    gc.collect()
    with open("/proc/self/maps") as file:
        maps = len(file.readlines())
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, resident


def fail_and_leave(rank: int, k: int) -> float:
    """One group of its own fails, asynchronously and in the other queue too; the next one works."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.03))
    if rank == 0:
        work = dist.all_reduce(torch.zeros(100), group=group, async_op=True)
        message = dist.irecv(torch.zeros(5), 1, group=group)
        assert message is not None
        assert attempt(work.wait).kind == "CollectiveTimeout"
        assert attempt(message.wait).kind == "CollectiveTimeout"
        assert attempt(lambda: dist.barrier(group)).kind == "CollectiveTimeout"
    dist.barrier()
    assert attempt(lambda: dist.destroy_process_group(group)).seconds < 1.0
    fresh = dist.new_group([0, 1])
    x = torch.full((1000,), float(k))
    dist.all_reduce(x, group=fresh, async_op=bool(k % 2))
    dist.barrier(fresh)
    dist.destroy_process_group(fresh)
    return float(x[-1])


def fifty_times(rank: int, world_size: int) -> tuple[list[bool], list[float]]:
    for k in range(8):
        fail_and_leave(rank, k)
    before = usage()
    right = [fail_and_leave(rank, k) == 2.0 * k for k in range(50)]
    return right, [after - was for was, after in zip(before, usage(), strict=True)]


def test_failed_groups_leave_nothing_behind() -> None:
    for right, (descriptors, threads, maps, resident) in ranks(2).run(fifty_times, timeout=100):
        assert right == [True] * 50
        assert descriptors <= 1
        assert threads <= 1
        assert maps <= 4
        assert resident < 8


def default_group_fails(rank: int, world_size: int, meeting: str) -> list[Any]:
    """The default group itself fails, is torn down, and another is made over another file, five times."""
    from hangs.job import init

    values: list[Any] = []
    for k in range(5):
        init(f"{meeting}-{k}", rank, world_size, 20.0)
        x = torch.ones(3)
        dist.all_reduce(x)
        values.append(x.tolist())
        fault = attempt(lambda: dist.recv(torch.zeros(1), 1 - rank))
        values.append(fault.kind)
        dist.destroy_process_group()
    return values


def test_default_groups_one_after_another(tmp_path: Any) -> None:
    results = ranks(2, group=False).run(default_group_fails, str(tmp_path / "meeting"))
    for values in results:
        assert values[::2] == [[2.0] * 3] * 5
        assert set(values[1::2]) == {"DeadlockError"}


def abandons(rank: int, world_size: int) -> Fault:
    """Works that nobody waits for, on a group that is destroyed while they are under way."""
    if rank == 0:
        work = dist.all_reduce(torch.zeros(10), async_op=True)
        start = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - start < 1.0
        return attempt(work.wait)
    time.sleep(0.5)
    return attempt(lambda: dist.all_reduce(torch.zeros(10)))


def test_destroy_with_a_call_under_way() -> None:
    with Job(abandons, 2) as job:
        first, second = job.results(10)
    first.says("UnisonoError", "destroy_process_group", "under way")
    assert second.kind in ("", "PeerLostError"), second


def without_threads(rank: int, world_size: int) -> tuple[Fault, float]:
    """Rank 1 can start no thread for its first asynchronous call, but can later."""
    x = torch.ones(1)
    if rank == 1:
        with patch.object(OwnThread, "start", side_effect=RuntimeError("can't start new thread")):
            fault = attempt(lambda: dist.all_reduce(x, async_op=True).wait())
    else:
        time.sleep(0.1)
        fault = attempt(lambda: dist.all_reduce(x, async_op=True).wait())
    y = torch.ones(1)
    dist.all_reduce(y, async_op=True).wait()
    return fault, float(y)


def test_a_worker_that_could_not_start_is_started_later() -> None:
    with Job(without_threads, 2) as job:
        (first, here), (second, there) = job.results(10)
    assert not first.kind
    second.says("UnisonoError", "the default group: no thread to carry calls in the background: can't start new thread")
    assert here == there == 2.0
