"""Calls on shared tensors: the results, bits and errors of staged calls, whoever shares and whoever uses the loops."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from hangs.job import Fault, Job, attempt, hurry, tell
from ranks import ranks
from unisono.algorithms import list_algorithms
from unisono.program import defaults
from unisono.runtime import prepared
from unisono.runtime.reduce import Reducer
from unisono.runtime.zero_copy import DIRECT, PUSHED
from unisono.transport import peer_mappings

# torch 2.11 has the older names alone
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PIECE = 1_200_000  # bytes of one rank's piece: more than a staging area holds
OF_ALL_SHARED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
Make = Callable[..., torch.Tensor]


def queue() -> Any:
    return dist.distributed_c10d._get_default_group()._group.collectives


def mode() -> int:
    """How the last call went."""
    return queue()._control.path


def inputs(dtype: torch.dtype, count: int, world_size: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    return [(torch.randn(count, generator=made) * 9).to(dtype) for _ in range(world_size)]


def every_call(
    rank: int, world_size: int, make: Make, dtype: torch.dtype, seen: list[int] | None = None
) -> list[torch.Tensor]:
    """One of each, on tensors that ``make`` gives: their results; ``seen`` fills up with how they went."""
    note = (seen if seen is not None else []).append
    count = PIECE // dtype.itemsize + 3
    data = inputs(dtype, count * world_size, world_size)

    def filled(*size: int, whole: bool = True) -> torch.Tensor:
        return make(*size, dtype=dtype).copy_(data[rank][: size[0]])

    x, y, z = filled(count), filled(count), filled(count * world_size)
    dist.all_reduce(x)
    note(mode())
    dist.all_reduce(y, dist.ReduceOp.MAX, async_op=True).wait()
    note(mode())
    part = make(count, dtype=dtype)
    reduce_scatter_single(part, z)
    note(mode())
    listed = make(count, dtype=dtype)
    dist.reduce_scatter(listed, list(z.chunk(world_size)))
    note(mode())
    gathered, rows = make(count * world_size, dtype=dtype), [make(count, dtype=dtype) for _ in range(world_size)]
    all_gather_single(gathered, z[:count])
    note(mode())
    dist.all_gather(rows, z[:count])
    note(mode())
    pieces, uneven = make(count * world_size, dtype=dtype), make(count * world_size, dtype=dtype).zero_()
    dist.all_to_all_single(pieces, z)
    note(mode())
    sizes = [[count if a == b else count - a for b in range(world_size)] for a in range(world_size)]
    sent, taken = sizes[rank], [sizes[peer][rank] for peer in range(world_size)]
    dist.all_to_all_single(uneven[: sum(taken)], z[: sum(sent)], taken, sent)
    note(mode())
    whole = filled(count)
    dist.broadcast(whole, world_size - 1)
    note(mode())
    inside = filled(count * world_size)
    reduce_scatter_single(inside[rank * count : (rank + 1) * count], inside)
    note(mode())
    return [x, y, part, listed, gathered, *rows, pieces, uneven, whole, inside]


def alike(rank: int, world_size: int, meeting: str, dtype: torch.dtype, sharing: list[list[int]]) -> list[list[int]]:
    """Every call staged, then with the ranks in ``sharing`` on shared tensors; the verdicts on those."""
    os.environ["UNISONO_FUSED"] = "0" if rank % 2 else "now"
    dist.init_process_group("unisono", f"file://{meeting}", rank=rank, world_size=world_size)
    expected = every_call(rank, world_size, torch.empty, dtype)
    found = []
    for group in sharing:
        for _ in range(3):
            seen: list[int] = []
            results = every_call(rank, world_size, unisono.empty if rank in group else torch.empty, dtype, seen)
            for a, b in zip(results, expected, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        found.append(seen)
    data = inputs(dtype, (PIECE // dtype.itemsize + 3) * world_size, world_size)
    total = sum((d[: expected[0].numel()].double() for d in data), torch.zeros(expected[0].numel()).double())
    assert torch.allclose(expected[0].double(), total, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_bits_of_staged_calls(world_size: int, tmp_path: Path) -> None:
    everybody = list(range(world_size))
    dtype = (torch.float32, torch.bfloat16, torch.int64)[world_size % 3]
    results = ranks(world_size, group=False).run(alike, str(tmp_path / "meeting"), dtype, [everybody, everybody[1:]])
    if world_size > 1:
        together, separate = results[1]  # rank 1 does without the loops
        assert set(together) <= {DIRECT, PUSHED}
        assert PUSHED in together
        assert [how for how in separate if how >= DIRECT] == [DIRECT]  # a broadcast, whose root shares
        assert len(together) > 8


def by_every_algorithm(rank: int, world_size: int, count: int, step: int) -> list[str]:
    """Algorithms that give something else on shared tensors than on others, or change what they shall only read."""
    wrong, data = [], inputs(torch.float32, count * world_size, world_size)[rank]
    for entry in list_algorithms()[::step]:
        if entry.simulation_only or entry.collective not in OF_ALL_SHARED:
            continue
        found = []
        for make in (torch.empty, unisono.empty):
            for _ in range(3 if make is unisono.empty else 1):  # the first of which only finds out
                whole, part = make(count * world_size).copy_(data), make(count).copy_(data[:count])
                with unisono.algorithm(entry.name):
                    try:
                        match entry.collective:
                            case "all_reduce":
                                dist.all_reduce(whole)
                                found.append(whole)
                                continue
                            case "reduce_scatter":
                                reduce_scatter_single(part, whole)
                                found.append(part)
                            case "all_gather":
                                result = make(count * world_size)
                                all_gather_single(result, part)
                                found.append(result)
                            case "all_to_all":
                                result = make(count * world_size)
                                dist.all_to_all_single(result, whole)
                                found.append(result)
                    except unisono.UsageError:  # it does not fit so many ranks
                        break
                if not torch.equal(whole, data):
                    wrong.append(f"{entry.name} {entry.collective} has changed its input")
        if not all(torch.equal(other, found[0]) for other in found):
            wrong.append(f"{entry.name} {entry.collective}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_algorithm_on_shared_tensors(world_size: int) -> None:
    for count, step in (5, 1), (300_000, world_size - 1):  # every second of the large ones on three ranks
        assert ranks(world_size).run(by_every_algorithm, count, step) == [[]] * world_size


def in_several_rounds(rank: int, world_size: int) -> bool:
    prepared.DIRECT_MOVED = 1 << 20
    queue().preparer.notify()  # prepares anew
    try:
        for _ in range(3):
            results = every_call(rank, world_size, unisono.empty, torch.float32)
        expected = every_call(rank, world_size, torch.empty, torch.float32)
        return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    finally:
        prepared.DIRECT_MOVED = defaults.DIRECT_MOVED
        queue().preparer.notify()


def test_in_several_rounds() -> None:
    assert ranks(2, group_timeout=29.0).run(in_several_rounds) == [True, True]


def disagreeing(rank: int, world_size: int) -> tuple[Fault, float]:
    """A mismatch among ranks that have staged nothing, for they hope to go directly; the next call is fine."""
    x = unisono.empty(500_000).fill_(rank + 1.0)
    for _ in range(3):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    op = (dist.ReduceOp.MAX, dist.ReduceOp.SUM)[rank]
    fault = attempt(lambda: dist.all_reduce(x, op))
    dist.all_reduce(x)
    return fault, x.max().item()


def test_a_mismatch() -> None:
    for fault, value in ranks(2).run(disagreeing):
        fault.says("MismatchError", r"rank 0: all_reduce\(float32 \[500000\], MAX\)", r"rank 1: .*SUM\)")
        assert value == 4.0


def refused(rank: int, world_size: int) -> tuple[float, int]:
    """A rank may not map its peers' memory: calls are staged, without a word."""

    def forbidden(*args: Any) -> None:
        raise PermissionError("not yours")

    mapped, found = peer_mappings._Mapped, []
    if rank == 1:
        peer_mappings._Mapped = forbidden
    try:
        x = unisono.empty(500_000).fill_(1.0)
        for _ in range(3):
            dist.all_reduce(x)
            found.append(mode())
    finally:
        peer_mappings._Mapped = mapped
    return x.sum().item(), max(found, default=0)


def test_memory_that_may_not_be_mapped() -> None:
    pool = ranks(2, group_timeout=28.0)
    assert [value for value, _ in pool.run(refused)] == [4_000_000.0] * 2
    assert pool.run(refused)[1][1] < DIRECT


def slowly(seconds: float) -> None:
    """From now on this rank takes its time over the first part that it reduces directly."""
    combine = Reducer.__call__

    def slow(self: Reducer, *args: Any) -> None:
        tell("reads")
        Reducer.__call__ = combine  # type: ignore[method-assign]
        time.sleep(seconds)
        combine(self, *args)

    Reducer.__call__ = slow  # type: ignore[method-assign]


def cut_short(rank: int, world_size: int, timeout: float, seconds: float) -> tuple[Fault, bool]:
    """Rank 1, which has no loops, is late over its peer's tensor; whether memory of that is used again on rank 0."""
    x = unisono.empty(500_000).fill_(1.0)
    for _ in range(3):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    address = x.data_ptr()
    hurry(timeout)
    if rank == 1:
        slowly(seconds)
    fault = attempt(lambda: dist.all_reduce(x, dist.ReduceOp.MAX))
    x = torch.empty(0)
    return fault, unisono.empty(500_000).data_ptr() == address


def test_a_peer_killed_while_it_reads() -> None:
    with Job(cut_short, 2, 30.0, 60.0) as job:
        job.hear("reads", [1])
        pid, killed = job.pid(1), job.signal(1, signal.SIGKILL)
        fault, again = job.results(10)[0]
    fault.says("PeerLostError", rf"rank 1 \(pid {pid} .*dead", r"all_reduce\(")
    assert fault.at - killed < 1.0
    assert not again


def test_a_tensor_given_up_while_a_peer_reads_gives_no_result() -> None:
    with Job(cut_short, 2, 0.5, 1.5) as job:
        (first, again), (late, _) = job.results(15)
    first.says("CollectiveTimeout", "rank 1 missing")
    assert not again  # what the late rank still writes to is no other tensor's
    late.says("PeerLostError", r"all_reduce\(float32 \[500000\], MAX\)", "no result to be trusted: rank 0 ")


def test_the_group_ends_and_nothing_stays_mapped(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(mapped_after_the_group, str(tmp_path / "meeting")) == [True, True]


def mapped_after_the_group(rank: int, world_size: int, meeting: str) -> bool:
    dist.init_process_group("unisono", f"file://{meeting}", rank=rank, world_size=world_size)
    x = unisono.empty(500_000).fill_(1.0)
    for _ in range(3):
        dist.all_reduce(x)
    during = len(peer_mappings._mapped)
    files = len(os.listdir("/proc/self/fd"))
    dist.destroy_process_group()
    return during == 1 and not peer_mappings._mapped and len(os.listdir("/proc/self/fd")) <= files
