"""Ranks that call different things: MismatchError on every rank, a table of who called what, a group that lives on."""

import logging
import re
import time
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
    "parts": (
        lambda: dist.all_reduce(zeros(8)),
        lambda: dist.all_reduce_coalesced([zeros(4), zeros(4)]),
        [r"all_reduce\(float32 \[8\], SUM\)", r"all_reduce\(2 tensors: float32 \[4\] \[4\], SUM\)"],
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
        for op, fault in zip(("all_to_all", "reduce_scatter", "all_gather"), faults, strict=True):
            if rank == 1:
                fault.says("UsageError", f"^{op} on rank 1: ", "2 .*3 ranks")
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


MESSAGES: list[tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]] = [
    # what is sent, what is expected, what both sides' errors must name besides
    (zeros(4), zeros(8), (r"\b4 elements of float32", r"\b8\b")),
    (zeros(8), zeros(4), (r"\b8 elements of float32", r"\b4\b")),
    (zeros(6), zeros(6, dtype=torch.int64), (r"\b6 elements of float32", "int64")),
    (zeros(3_000_000), zeros(1_000), ("3000000 elements", r"\b1000\b")),
    (zeros(0), zeros(2), (r"\b0 elements", r"\b2\b")),
]
ENDS = ["wait", "send", "recv", "barrier", "all_reduce", "asynchronous", "long recv", "long barrier"]


def messages(rank: int, world_size: int, end: str) -> list[tuple[Fault, float, float]]:
    """Each message is refused; its sender hears of it at the next thing it does, and all go on."""
    told, other, gate = [], zeros(2), dist.new_group()
    ends: dict[str, tuple[Call, Call]] = {
        # what the sender does next, and what the receiver does
        "wait": (lambda: None, lambda: None),
        "send": (lambda: dist.send(zeros(2), 1), lambda: dist.recv(other, 0)),
        "recv": (lambda: dist.recv(other, 1), lambda: dist.send(zeros(2), 0)),
        "all_reduce": (lambda: dist.all_reduce(zeros(70_000)),) * 2,
        "asynchronous": (lambda: dist.all_reduce(zeros(2), async_op=True).wait(),) * 2,
        "barrier": (dist.barrier, dist.barrier),
    }
    sends, receives = ends[end.removeprefix("long ")]
    for sent, expected, _ in MESSAGES:
        first = second = Fault("", "", 0.0, 0.0)
        work = dist.isend(sent, 1) if rank == 0 else None
        if rank == 1:
            first = attempt(lambda expected=expected: dist.recv(expected, 0))
        elif end != "wait" and work is not None:
            first = attempt(work.wait)
        dist.barrier(gate)  # by now it has been refused
        if end == "wait" and work is not None:
            first = attempt(work.wait)
            assert attempt(work.wait).text == first.text
            assert not work.is_success()
            assert str(work.exception()) == first.text
            assert first.text in attempt(work.get_future().wait).text
        elif rank == 0:
            second = attempt(sends)
            if end == "long recv" and "withdrawn" in second.text:
                sends()
        else:
            time.sleep(0.3 * ("long" in end))
            if rank == 1 or sends is receives:
                receives()
        told.append((first if first.kind else second, total(), total()))
    dist.destroy_process_group(gate)
    return told


@pytest.mark.parametrize("end", ENDS)
def test_a_message_refused_is_an_error_on_both_sides(end: str) -> None:
    senders, receivers, _ = ranks(3).run(messages, end)
    for (sender, *sums), (receiver, *others), (_, _, named) in zip(senders, receivers, MESSAGES, strict=True):
        receiver.says("MismatchError", "rank 1 expects recv", "from rank 0", *named)
        sender.says("MismatchError", "rank 1 refused a message of rank 0", "can still be used", "tag 0", *named)
        assert sender.seconds < 1.0
        assert receiver.seconds < 1.0
        assert sums == others == [9.0, 9.0]


def last_words(rank: int, world_size: int) -> list[str]:
    """A message refused after its sender's last call in a group: logged as the sender leaves it."""
    group, said = dist.new_group([0, 1]), []
    if rank == 0:
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("unisono").addHandler(handler)
        dist.send(zeros(3), 1, group=group)
    dist.barrier()  # sent before it is refused: else the send may hear of it
    if rank == 1:
        said.append(attempt(lambda: dist.recv(zeros(2), 0, group=group)).text)
    dist.barrier()
    if rank < 2:
        dist.destroy_process_group(group)
    if rank == 0:
        logging.getLogger("unisono").removeHandler(handler)
    return said


def test_a_message_refused_that_nobody_asked_for_is_logged() -> None:
    (said,), (text,), _ = ranks(3).run(last_words)
    assert "3 elements of float32" in text
    assert re.search("rank 1 refused a message of rank 0: send of 3 elements of float32 .* recv of 2 elements", said)
