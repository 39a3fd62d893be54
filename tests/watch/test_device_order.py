"""Opposite orders of two groups' calls on GPUs, found on the host; no GPU is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.backend.device_stalls import Stalls
from unisono.errors import CollectiveTimeout, DeadlockError
from unisono.runtime.call import Call
from unisono.watch.device_order import Issued, crossed, order_word

STREAM, OTHER = 0x7F00_0010, 0x7F00_0020


def issued(*places: tuple[str, int, int, int]) -> list[Issued]:
    """Calls with rank 1 on one stream: the group, the place here, the place there, the stream there."""
    return [Issued(group, group, 1, mine << 24 | 1, theirs << 24 | stream) for group, mine, theirs, stream in places]


def test_orders_that_cross() -> None:
    calls = issued(("a", 1, 1, 1), ("b", 2, 4, 1), ("b", 5, 6, 1), ("a", 3, 2, 1))
    found = crossed(calls)
    assert found is not None
    assert [(call.group, call.mine >> 24) for call in found] == [("b", 2), ("a", 3)]


@pytest.mark.parametrize(
    "calls",
    [
        issued(("a", 1, 10, 1), ("b", 2, 11, 1), ("a", 3, 13, 1)),  # one order
        issued(("a", 1, 2, 1), ("b", 2, 1, 2)),  # on streams of their own there
        issued(("a", 1, 2, 0), ("b", 2, 1, 0)),  # by NCCL there
        [],
    ],
)
def test_orders_that_do_not(calls: list[Issued]) -> None:
    assert crossed(calls) is None


def call(numel: int) -> Call:
    return Call("all_reduce", torch.float32, (numel,), "SUM")


def two_groups(rank: int, world_size: int, streams: tuple[int, int], turned: bool) -> list[str]:
    """What the watchers of both groups find when rank 1 issues their calls the other way round."""
    groups: list[Any] = [dist.new_group(group_desc=name) for name in ("left", "right")]
    for group in groups:
        dist.barrier(group)
    guards = [group._group.device_guard for group in groups]
    inner: Any = SimpleNamespace(unfinished=lambda: False)
    watched = [Stalls(guard, inner) for guard in guards]
    for number in (1, 2):
        order = (1, 0) if turned and number == 2 and rank == 1 else (0, 1)
        for k in order:
            made = call(number)
            guards[k].launched(made, guards[k].header(made), order_word(streams[k]))
    dist.barrier()
    found = []
    for _ in range(2):
        found = []
        for one in watched:
            try:
                one.check(60.0)
                found.append("")
            except DeadlockError as error:
                found.append(str(error))
    dist.barrier()
    for one, group in zip(watched, groups, strict=True):
        one.close()
        dist.destroy_process_group(group)
    return found


def test_both_groups_of_both_ranks_learn_of_it() -> None:
    for rank, found in enumerate(ranks(2).run(two_groups, (STREAM, STREAM), True)):
        first, second = ("left", "right") if rank == 0 else ("right", "left")
        for words in found:
            assert words.startswith("ranks wait for each other on GPUs, and none can go on:\n")
            assert "this rank has issued all_reduce(float32 [2], SUM), call no. 2 of " in words
            assert words.index(f"({first})") < words.index(f"({second})")
            assert f"rank {1 - rank} has issued them the other way round" in words


@pytest.mark.parametrize(("streams", "turned"), [((STREAM, STREAM), False), ((STREAM, OTHER), True)])
def test_one_order_or_streams_of_their_own(streams: tuple[int, int], turned: bool) -> None:
    assert ranks(2).run(two_groups, streams, turned) == [["", ""]] * 2


def stuck(rank: int, world_size: int, unfinished: bool) -> str:
    group: Any = dist.new_group()
    dist.barrier(group)
    guard = group._group.device_guard
    inner: Any = SimpleNamespace(unfinished=lambda: unfinished)
    watch, made = Stalls(guard, inner), call(5)
    guard.issued(made, guard.header(made))
    dist.barrier()
    watch.check(60.0)
    watch.check(60.0)
    try:
        watch.check(-1.0)
    except CollectiveTimeout as error:
        return str(error)
    finally:
        dist.barrier()
        watch.close()
        dist.destroy_process_group(group)
    return ""


def test_a_call_that_nccl_does_not_end() -> None:
    for words in ranks(2).run(stuck, True):
        assert "up to all_reduce(float32 [5], SUM), its no. 1 on GPUs, did not end within -1 s" in words
    assert ranks(2).run(stuck, False) == ["", ""]
