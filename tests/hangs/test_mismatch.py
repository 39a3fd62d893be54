"""Ranks that call different things: MismatchError on every rank, a table of who called what, a group that lives on."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, attempt, line_of
from ranks import ranks

Op = dist.ReduceOp
Call = Callable[[], object]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def gathers(own: int, *expected: int) -> Call:
    return lambda: dist.all_gather([zeros(n) for n in expected], zeros(own))


def exchanges(sends: list[int], receives: list[int]) -> Call:
    return lambda: dist.all_to_all_single(zeros(sum(receives)), zeros(sum(sends)), receives, sends)


CASES: dict[str, tuple[Call, Call, list[str]]] = {
    # what ranks 0 and 1 call, what rank 2 calls, and what the errors must name besides
    "operation": (lambda: dist.all_reduce(zeros(4)), lambda: dist.broadcast(zeros(4), 0), ["all_reduce", "broadcast"]),
    "barrier": (lambda: dist.all_reduce(zeros(4)), lambda: dist.barrier(), ["all_reduce", "barrier"]),
    "dtype": (
        lambda: dist.all_reduce(zeros(4)),
        lambda: dist.all_reduce(zeros(4, dtype=torch.int64)),
        ["float32", "int64"],
    ),
    "dtype of equal size": (
        lambda: dist.broadcast(zeros(4), 0),
        lambda: dist.broadcast(zeros(4, dtype=torch.int32), 0),
        ["float32", "int32"],
    ),
    "count": (lambda: dist.all_reduce(zeros(4)), lambda: dist.all_reduce(zeros(8)), [r"\[4\]", r"\[8\]"]),
    "shape": (lambda: dist.all_reduce(zeros(2, 3)), lambda: dist.all_reduce(zeros(3, 2)), [r"\[2, 3\]", r"\[3, 2\]"]),
    "nine dimensions": (
        lambda: dist.all_reduce(zeros(1, 1, 1, 1, 1, 1, 1, 2, 3)),
        lambda: dist.all_reduce(zeros(1, 1, 1, 1, 1, 1, 1, 3, 2)),
        [r"1, 2, 3\]", r"1, 3, 2\]"],
    ),
    "no elements": (lambda: dist.all_reduce(zeros(4)), lambda: dist.all_reduce(zeros(0)), [r"\[4\]", r"\[0\]"]),
    "reduce op": (
        lambda: dist.all_reduce(zeros(4)),
        lambda: dist.all_reduce(zeros(4), Op.MAX),
        ["SUM", "MAX"],
    ),
    "root of broadcast": (
        lambda: dist.broadcast(zeros(4), 0),
        lambda: dist.broadcast(zeros(4), 2),
        ["root 0", "root 2"],
    ),
    "root of reduce": (lambda: dist.reduce(zeros(4), 1), lambda: dist.reduce(zeros(4), 2), ["root 1", "root 2"]),
    "root of gather": (
        lambda: dist.gather(zeros(2), [zeros(2) for _ in range(3)] if dist.get_rank() == 0 else None, 0),
        lambda: dist.gather(zeros(2), [zeros(2) for _ in range(3)], 2),
        ["root 0", "root 2"],
    ),
    "large": (
        lambda: dist.all_reduce(zeros(3_000_000)),
        lambda: dist.all_reduce(zeros(3_000_001)),
        ["3000000", "3000001"],
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(zeros(4), zeros(12)),
        lambda: dist.reduce_scatter_tensor(zeros(5), zeros(15)),
        ["reduce_scatter"],
    ),
    "all_gather splits": (gathers(4, 4, 4, 4), gathers(5, 4, 4, 5), ["rank 2 sends 5 elements to rank 0.*expects 4"]),
    "all_to_all splits": (
        exchanges([2, 2, 2], [2, 2, 2]),
        exchanges([2, 3, 1], [2, 2, 2]),
        ["rank 2 sends 3 elements to rank 1, which expects 2"],
    ),
    "scatter pieces": (
        lambda: dist.scatter(zeros(3), [zeros(3) for _ in range(3)] if dist.get_rank() == 0 else None, 0),
        lambda: dist.scatter(zeros(4), None, 0),
        ["rank 0 sends 3 elements to rank 2, which expects 4"],
    ),
    "gather pieces": (
        lambda: dist.gather(zeros(3), [zeros(3) for _ in range(3)] if dist.get_rank() == 0 else None, 0),
        lambda: dist.gather(zeros(1), None, 0),
        ["rank 2 sends 1 elements to rank 0, which expects 3"],
    ),
}


def total(group: Any = None) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return float(x.sum())


def disagree(rank: int, world_size: int, name: str) -> tuple[Fault, float, float]:
    usual, other, _ = CASES[name]
    fault = attempt(other if rank == 2 else usual)
    return fault, total(), total()


@pytest.mark.parametrize("name", CASES)
def test_every_rank_names_the_odd_one_and_goes_on(name: str) -> None:
    results = ranks(3).run(disagree, name)
    facts = CASES[name][2]
    for fault, *sums in results:
        fault.says("MismatchError", r"call no\. \d+", "rank 0", "rank 1", "-> rank 2", *facts)
        assert len(re.findall(r"test_mismatch\.py:\d+", fault.text)) == 3, fault.text
        assert "can still be used" in fault.text
        assert fault.seconds < 1.0
        assert sums == [9.0, 9.0]
    assert len({fault.text for fault, *_ in results}) == 1


def two_calls(rank: int, world_size: int) -> Fault:
    """Four calls alike on a group of its own, then one that differs; each rank's on a line of its own."""
    group = dist.new_group([0, 2])
    if rank == 1:
        dist.barrier()
        return Fault("", "", 0.0, 0.0)
    for _ in range(4):
        dist.barrier(group)
    x = zeros(5)
    if rank == 0:
        fault = attempt(lambda: dist.broadcast(x, 2, group=group))
    else:
        fault = attempt(lambda: dist.broadcast(x, 0, group=group))
    dist.barrier()
    dist.destroy_process_group(group)
    return fault


def test_the_call_is_numbered_and_every_line_is_named() -> None:
    first, _, third = ranks(3).run(two_calls)
    for fault in (first, third):
        fault.says(
            "MismatchError",
            r"group \d+ \[0, 2\] disagree about call no\. 5",
            rf"-> rank 0: broadcast\(float32 \[5\], root 2\) .*{line_of(two_calls, 'broadcast(x, 2')}",
            rf"-> rank 2: broadcast\(float32 \[5\], root 0\) .*{line_of(two_calls, 'broadcast(x, 0')}",
        )


def crossed(rank: int, world_size: int, asynchronous: bool) -> list[Any]:
    """Two calls in another order on rank 1: both fail on all ranks, and neither tensor has changed."""
    a, b = torch.ones(4), torch.ones(4)
    calls = [lambda: dist.all_reduce(a, async_op=asynchronous), lambda: dist.broadcast(b, 0, async_op=asynchronous)]
    if rank == 1:
        calls.reverse()
    if asynchronous:
        works = [call() for call in calls]
        faults = [attempt(work.wait) for work in works]
    else:
        faults = [attempt(call) for call in calls]
    return [faults, a.tolist(), b.tolist(), total()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_order(asynchronous: bool) -> None:
    for faults, a, b, after in ranks(3).run(crossed, asynchronous):
        for fault in faults:
            fault.says("MismatchError", "all_reduce", "broadcast", "-> rank 1", "test_mismatch.py")
        assert a == b == [1.0] * 4
        assert after == 9.0


def crossed_groups(rank: int, world_size: int) -> list[Any]:
    """Two groups of the same ranks, the same call with other data on either, in crossed order, asynchronous."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x = [torch.full((2,), 1.0), torch.full((2,), 10.0)]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dist.all_reduce(x[k], group=groups[k], async_op=True) for k in order]
    for work in works:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)
    return [t.tolist() for t in x]


def test_crossed_order_of_groups_is_fine_when_nobody_blocks() -> None:
    assert ranks(2).run(crossed_groups) == [[[2.0, 2.0], [20.0, 20.0]]] * 2


def refusals(rank: int, world_size: int) -> list[Any]:
    """Mistakes that one rank's arguments show: it hears what is wrong, the others hear of it."""
    wrong: list[Call] = [
        lambda: dist.all_to_all([zeros(2) for _ in range(3)], [zeros(2) for _ in range(2)]),
        lambda: dist.reduce_scatter(zeros(2), [zeros(2), zeros(2)]),
        lambda: dist.all_gather([zeros(2), zeros(2)], zeros(2)),
    ]
    right: list[Call] = [
        lambda: dist.all_to_all([zeros(2) for _ in range(3)], [zeros(2) for _ in range(3)]),
        lambda: dist.reduce_scatter(zeros(2), [zeros(2) for _ in range(3)]),
        lambda: dist.all_gather([zeros(2) for _ in range(3)], zeros(2)),
    ]
    faults = [attempt(call) for call in (wrong if rank == 1 else right)]
    return [faults, total()]


def test_one_rank_with_bad_arguments() -> None:
    results = ranks(3).run(refusals)
    for rank, (faults, after) in enumerate(results):
        for fault in faults:
            if rank == 1:
                fault.says("UsageError", "2 .*3 ranks")
            else:
                fault.says("MismatchError", "-> rank 1", "refused: 2 .*3 ranks", "test_mismatch.py")
        assert after == 9.0


def global_ranks(rank: int, world_size: int) -> tuple[Fault, Fault]:
    """A rank within the group given where torch wants a global one; a call of a rank that is no member."""
    group = dist.new_group([1, 3])
    outside = inside = Fault("", "", 0.0, 0.0)
    if rank in (1, 3):
        inside = attempt(lambda: dist.broadcast(zeros(2), 0, group=group))
    else:
        outside = attempt(lambda: dist.broadcast(zeros(2), 1, group=group))
    total()
    if rank in (1, 3):
        dist.destroy_process_group(group)
    return inside, outside


@pytest.mark.filterwarnings("ignore")
def test_global_ranks_and_strangers() -> None:
    results = ranks(4).run(global_ranks)
    for rank in (1, 3):
        inside = results[rank][0]
        inside.says("ValueError", "0", r"\[1, 3\]", "group_src")


def messages(rank: int, world_size: int) -> list[Fault]:
    """Sizes and dtypes that sender and receiver see differently, then one that fits."""
    sent = [zeros(4), zeros(8), zeros(6), zeros(3_000_000), torch.ones(2)]
    received = [zeros(8), zeros(4), zeros(6, dtype=torch.int64), zeros(1_000), zeros(2)]
    if rank == 0:
        return [attempt(lambda x=x: dist.send(x, 1)) for x in sent]
    if rank == 1:
        faults = [attempt(lambda x=x: dist.recv(x, 0)) for x in received]
        assert received[-1].tolist() == [1.0, 1.0]
        assert not any(x.any() for x in received[:-1])
        return faults
    return []


def test_messages() -> None:
    senders, receivers, _ = ranks(3).run(messages)
    facts = [(r"4\b", r"8\b"), (r"8\b", r"4\b"), ("float32", "int64"), ("3000000", "1000"), ()]
    for sender, receiver, named in zip(senders, receivers, facts, strict=True):
        if named:
            receiver.says("MismatchError", "rank 1", "rank 0", "recv", *named)
        else:
            receiver.says("")
        if sender.kind:  # a short message may be on its way already when its receiver refuses it
            sender.says("MismatchError", "rank 1", *named)
        assert sender.seconds < 1.0
        assert receiver.seconds < 1.0
