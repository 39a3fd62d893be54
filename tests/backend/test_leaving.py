"""What a process keeps of groups that are left, however that came about: no descriptor, thread, mapping or port."""

import datetime
import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from hangs.job import attempt
from ports import free_port
from ranks import BACKEND, ranks

kept: list[Any] = []  # by a program that is done with its groups


def held() -> Counter[str]:
    """Descriptors by what they are of, threads, and mappings of shared memory of this process."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.lexists(link):
            found[os.readlink(link).partition(":[")[0]] += 1
    found["threads"] = len(os.listdir("/proc/self/task"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    found["mappings"] = sum("memfd:" in line or "/dev/shm/" in line for line in maps)
    return found


def start(rank: int, world_size: int, meeting: str, seconds: float = 20.0, **options: Any) -> None:
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group(BACKEND, init_method=meeting, rank=rank, world_size=world_size, timeout=limit, **options)


def calls(group: Any = None) -> None:
    x = torch.ones(1 << 19)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.barrier(group=group)


def forget() -> None:
    """Drops every group as a program does that clears torch's tables."""
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.clear()
    world.tags_to_pg.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0
    gc.collect()


def destroyed(rank: int, world_size: int, meeting: str) -> None:
    start(rank, world_size, meeting)
    calls()
    dist.barrier()
    dist.destroy_process_group()


def destroyed_twice(rank: int, world_size: int, meeting: str) -> None:
    destroyed(rank, world_size, meeting)
    assert attempt(dist.destroy_process_group).kind


def with_subgroups(rank: int, world_size: int, meeting: str) -> None:
    start(rank, world_size, meeting)
    one, other = (dist.new_group(list(range(world_size))) for _ in range(2))
    calls(one)
    calls(other)
    dist.new_group(list(range(world_size)))  # never used
    dist.destroy_process_group(one)
    dist.barrier()
    dist.destroy_process_group()


def in_the_midst_of_calls(rank: int, world_size: int, meeting: str) -> None:
    start(rank, world_size, meeting)
    dist.barrier()
    work, message = dist.all_reduce(torch.ones(5), async_op=True), dist.irecv(torch.ones(3), 1 - rank)
    kept.extend([work, work.get_future(), message])
    dist.destroy_process_group()


def after_an_error(rank: int, world_size: int, meeting: str) -> None:
    start(rank, world_size, meeting)
    assert attempt(lambda: dist.all_reduce(torch.ones(3 + rank))).kind == "MismatchError"
    dist.destroy_process_group()
    gc.collect()


def after_an_exception(rank: int, world_size: int, meeting: str) -> None:
    try:
        start(rank, world_size, meeting)
        calls()
        raise KeyError("the user's")
    except KeyError:
        dist.destroy_process_group()


def while_others_hold_the_group(rank: int, world_size: int, meeting: str) -> None:
    start(rank, world_size, meeting)
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    kept.extend([model, dist.group.WORLD])
    dist.barrier()
    dist.destroy_process_group()


def dropped(rank: int, world_size: int, meeting: str) -> None:
    start(rank, world_size, meeting)
    group = dist.new_group(list(range(world_size)))
    calls(group)
    calls()
    del group
    forget()


def a_rank_is_missing(rank: int, world_size: int, meeting: str) -> None:
    assert attempt(lambda: start(rank, world_size + 1, meeting, 0.3)).kind == "CollectiveTimeout"
    gc.collect()


def other_world_sizes(rank: int, world_size: int, meeting: str) -> None:
    assert attempt(lambda: start(rank, world_size + rank, meeting, 0.5)).kind
    gc.collect()


def bad_options(rank: int, world_size: int, meeting: str) -> None:
    assert attempt(lambda: start(rank, world_size, meeting, pg_options="fast")).kind == "UsageError"


SITUATIONS: list[Callable[[int, int, str], None]] = [
    destroyed,
    destroyed_twice,
    with_subgroups,
    in_the_midst_of_calls,
    after_an_error,
    after_an_exception,
    while_others_hold_the_group,
    dropped,
    a_rank_is_missing,
    other_world_sizes,
    bad_options,
]


def growth(
    rank: int, world_size: int, situation: Callable[[int, int, str], None], meetings: list[str]
) -> dict[str, int]:
    """What the process holds after the last meeting beyond what it held after the second."""
    for meeting in meetings[:2]:
        situation(rank, world_size, meeting)
    before = held()
    for meeting in meetings[2:]:
        situation(rank, world_size, meeting)
    return dict(held() - before)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_nothing_is_kept(situation: Callable[[int, int, str], None], tmp_path: Path) -> None:
    meetings = [f"file://{tmp_path}/{k}" for k in range(6)]
    assert ranks(2, group=False).run(growth, situation, meetings) == [{}, {}]


@pytest.mark.parametrize("situation", [destroyed, while_others_hold_the_group], ids=lambda s: s.__name__)
def test_the_store_is_not_kept(situation: Callable[[int, int, str], None]) -> None:
    meetings = [f"tcp://127.0.0.1:{free_port()}" for _ in range(5)]
    assert ranks(2, group=False).run(growth, situation, meetings) == [{}, {}]


def alone_again_and_again(rank: int, world_size: int, meeting: str) -> dict[str, int]:
    before = held()
    for _ in range(3):
        destroyed(rank, world_size, meeting)
    left = held() - before
    del left["pipe"]  # of the event loop that torch's store serves by, made once
    return dict(left)


def test_the_port_is_free_again() -> None:
    assert ranks(1, group=False).run(alone_again_and_again, f"tcp://127.0.0.1:{free_port()}") == [{}]


def tries_again(rank: int, world_size: int, meeting: str) -> float:
    """Rank 0 begins before the others are there, and gives up once."""
    if rank == 0:
        assert attempt(lambda: start(rank, world_size, meeting, 0.3)).kind == "CollectiveTimeout"
        Path(meeting.removeprefix("file://") + ".tried").touch()
    while not os.path.exists(meeting.removeprefix("file://") + ".tried"):
        os.sched_yield()
    start(rank, world_size, meeting)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x)


def test_a_failed_init_can_be_tried_again(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(tries_again, f"file://{tmp_path}/meeting") == [2.0, 2.0]


def drops(rank: int, world_size: int, meeting: str) -> str:
    start(rank, world_size, meeting)
    calls()
    if rank == 0:
        forget()
        return ""
    fault = attempt(dist.barrier)
    assert fault.kind == "PeerLostError"
    dist.destroy_process_group()
    return fault.text


def test_the_others_hear_of_a_dropped_group(tmp_path: Path) -> None:
    _, text = ranks(2, group=False).run(drops, f"file://{tmp_path}/meeting")
    assert "has dropped the group without destroy_process_group" in text


def leave_unused_groups(rank: int, world_size: int, meeting: str) -> int:
    """Makes and leaves groups that no rank calls, the last rank before the first has made them; counts descriptors."""
    start(rank, world_size, meeting)
    last = rank == world_size - 1
    before = sum(held().values())
    for _ in range(30):
        if last:
            dist.destroy_process_group(dist.new_group())
        dist.barrier()
        if not last:
            dist.destroy_process_group(dist.new_group())
        dist.barrier()
    gc.collect()
    after = sum(held().values())
    dist.destroy_process_group()
    return after - before


def test_groups_that_were_never_used_keep_nothing(tmp_path: Path) -> None:
    grown = ranks(3, group=False).run(leave_unused_groups, f"file://{tmp_path}/meeting")
    assert max(grown) < 10, grown  # the last one may still be kept, and a thread is new
