"""Objects that can not be pickled: torch raises on that rank before it communicates; the others never hang over it."""

from typing import Any

import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt
from ranks import ranks


def unpicklable() -> Any:
    return lambda: 1


def uncaught(rank: int, world_size: int) -> Fault:
    dist.barrier()
    objects: list[Any] = [None] * world_size
    if rank == 1:
        dist.all_gather_object(objects, unpicklable())
    return attempt(lambda: dist.all_gather_object(objects, {"rank": rank}))


def test_the_others_read_the_pickling_error() -> None:
    with Job(uncaught, 3) as job:
        first, _, third = job.results(10)
        pid = job.pid(1)
    for fault in (first, third):
        fault.says("PeerLostError", rf"rank 1 \(pid {pid} on .*\) ended|rank 1 \(pid {pid} on .*\) is dead", "pickle")
        assert fault.seconds < 1.5


def caught(rank: int, world_size: int) -> tuple[Fault, Fault, list[Any]]:
    """Rank 1 catches its error and goes on: the next call tells all, and then they are in step again."""
    objects: list[Any] = [None] * world_size
    thing = unpicklable() if rank == 1 else {"rank": rank}
    first = attempt(lambda: dist.all_gather_object(objects, thing))
    second = attempt(dist.barrier) if rank == 1 else first
    dist.all_gather_object(objects, rank)
    return first, second, objects


def test_caught_it_is_a_mismatch_on_all_and_the_group_goes_on() -> None:
    results = ranks(3).run(caught)
    assert "pickle" in results[1][0].text
    for first, second, objects in results:
        fault = second if "pickle" in first.text else first
        fault.says("MismatchError", "-> rank 1: barrier", "rank 0: all_gather", "test_objects.py")
        assert objects == [0, 1, 2]


def broadcast(rank: int, world_size: int) -> tuple[Fault, int]:
    objects = [unpicklable() if rank == 0 else None]
    fault = attempt(lambda: dist.broadcast_object_list(objects, 0))
    if rank == 0:
        attempt(dist.barrier)
    x = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(x)
    return fault, int(x)


def test_broadcast() -> None:
    first, *others = ranks(3).run(broadcast)
    assert "pickle" in first[0].text
    for fault, _ in others:
        fault.says("MismatchError", "rank 0: barrier", "rank 1: broadcast")
    assert [total for _, total in (first, *others)] == [3, 3, 3]
