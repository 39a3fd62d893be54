"""Every interpreter gives the same bits, whoever uses which, in the background as in the foreground."""

import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import ranks
from unisono.errors import UsageError
from unisono.runtime.collectives import CollectiveQueue
from unisono.runtime.loops import COMPILE_AFTER, Loops, loops, wanted
from unisono.runtime.words import DIFFERS, WAITS
from unisono.torch_names import all_gather_single, reduce_scatter_single
from unisono.transport import futex
from unisono.transport.board import Board
from unisono.transport.segment import create
from unisono.watch.monitor import GroupMonitor

ORDERED, BITS = ("SUM", "PRODUCT", "MIN", "MAX"), ("BAND", "BXOR")
FLOATING = (*ORDERED, "AVG", "PREMUL_SUM")
OPS = {
    torch.float32: FLOATING,
    torch.float64: ("SUM", "MAX", "AVG", "PREMUL_SUM"),
    torch.bfloat16: FLOATING,
    torch.float16: FLOATING,
    torch.int32: ("SUM", "PRODUCT", "AVG"),
    torch.int64: (*ORDERED, "AVG", "BOR"),
    torch.uint8: ("SUM", "AVG", "MIN", *BITS),
    torch.int8: ("SUM", "AVG", "MIN"),
    torch.int16: BITS,
    torch.bool: ("MAX", "BOR"),
    torch.uint32: ("SUM", "AVG", "MAX"),
    torch.complex64: ("SUM", "AVG", "PREMUL_SUM"),
}
BY_TORCH = (
    (torch.int8, "MIN"), (torch.int8, "AVG"), (torch.uint32, "MAX"), (torch.uint32, "AVG"), (torch.complex64, "AVG"),
)  # fmt: skip
COUNTS = (0, 1, 2049, 200_001)


def inputs(dtype: torch.dtype, count: int, world_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    made = [(torch.randn(count, generator=generator) * 3).to(torch.int64).to(dtype) for _ in range(world_size)]
    if dtype.is_floating_point and count > 2:
        made = [(torch.randn(count, generator=generator) * 3).to(dtype) for _ in range(world_size)]
        made[0][1], made[-1][2] = float("nan"), float("inf")
    return made


Keep = Callable[[torch.Tensor], None]


def combined(rank: int, world_size: int, mine: torch.Tensor, op: str, keep: Keep) -> None:
    """What every call that reduces gives."""
    x, count = mine.clone(), mine.numel()
    reduce_op = dist._make_nccl_premul_sum(0.3 + rank) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
    work = dist.all_reduce(x, reduce_op, async_op=count % 2 == 1)
    if work is not None:
        work.wait()
    keep(x)
    x = mine.clone()
    dist.reduce(x, count % world_size, reduce_op)
    keep(x)
    part = torch.empty(count // world_size, dtype=mine.dtype)
    whole = mine[: part.numel() * world_size].clone()
    reduce_scatter_single(part, whole, reduce_op)
    keep(part)
    dist.reduce_scatter(part.zero_(), [p.clone() for p in whole.view(world_size, -1)], reduce_op)
    keep(part)


def moved(rank: int, world_size: int, mine: torch.Tensor, keep: Keep) -> None:
    """What every call that moves gives."""
    count, root = mine.numel(), mine.numel() % world_size
    gathered = mine.new_empty(count * world_size)
    all_gather_single(gathered, mine)
    keep(gathered)
    whole = mine[: count // world_size * world_size].clone()
    pieces = torch.empty_like(whole)
    dist.all_to_all_single(pieces, whole)
    keep(pieces)
    outputs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(outputs, mine)
    keep(torch.cat(outputs))
    dist.all_to_all(outputs, [mine + r if mine.dtype.is_floating_point else mine.clone() for r in range(world_size)])
    keep(torch.cat(outputs))
    dist.gather(mine, [o.zero_() for o in outputs] if rank == root else None, root)
    keep(torch.cat(outputs))
    work = dist.scatter(mine, [o + o for o in outputs] if rank == root else None, root, async_op=count % 2 == 1)
    if work is not None:
        work.wait()
    keep(mine)
    dist.broadcast(mine, root)
    keep(mine)


def seen(ways: dict[str, Callable[..., int]], unusual: list[str]) -> dict[str, Callable[..., int]]:
    """Loops that note when they meet unexpected headers."""

    def run(*args: int) -> int:
        outcome = ways["run"](*args)
        if outcome == DIFFERS:
            unusual.append("differs")
        return outcome

    return {**ways, "run": run}


def results(rank: int, world_size: int, path: str, modes: list[str]) -> tuple[list[bytes], list[str]]:
    """Digests of the bytes that every call gives, NaNs made one; what went the long way, or met unexpected headers."""
    os.environ["UNISONO_FUSED"] = modes[rank % len(modes)]
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    group = dist.distributed_c10d._get_default_group()
    found: list[bytes] = []

    def keep(x: torch.Tensor) -> None:
        if x.is_floating_point() or x.is_complex():
            x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
        found.append(hashlib.blake2b(x.view(torch.uint8).numpy()).digest())

    unusual, do = [], group._general
    group._general = lambda op, *args: unusual.append(op) or do(op, *args)
    ways = loops.of
    loops.of = lambda kind: seen(ways(kind), unusual)  # type: ignore[method-assign]
    for turn, (dtype, ops) in enumerate(OPS.items()):
        for count in COUNTS:
            mine = inputs(dtype, count, world_size)[rank]
            for op in ops if count < COUNTS[-1] else ops[turn % 2 :: 2]:  # the largest by turns
                combined(rank, world_size, mine, op, keep)
                if (dtype, op) in BY_TORCH:
                    unusual.clear()
            if dtype in (torch.float32, torch.float16, torch.uint8):
                moved(rank, world_size, mine, keep)
    dist.destroy_process_group()
    del loops.of
    return found, unusual


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_torchs_operations(world_size: int, tmp_path: Path) -> None:
    pool = ranks(world_size, group=False)
    plain = [found for found, _ in pool.run(results, str(tmp_path / "plain"), ["0"])]
    mixed = pool.run(results, str(tmp_path / "mixed"), ["now", "0"])
    loops = pool.run(results, str(tmp_path / "loops"), ["now"])
    assert [found for found, _ in mixed] == [found for found, _ in loops] == plain
    assert [unusual for _, unusual in [mixed[0], *loops]] == [[]] * (1 + world_size)


def overlapping(rank: int, world_size: int) -> list[list[float]]:
    """Outputs that are their own input's place, or lie across it."""
    memory = torch.zeros(6)
    memory[2 * rank : 2 * rank + 2] = torch.tensor([1.0, 2.0]) + 10 * rank
    all_gather_single(memory[:4], memory[2 * rank : 2 * rank + 2])
    across = torch.arange(6.0) + 10 * rank
    all_gather_single(across[1:5], across[0:2])
    inside = torch.arange(4.0) + 10 * rank
    reduce_scatter_single(inside[2 * rank : 2 * rank + 2], inside)
    return [memory[:4].tolist(), across[1:5].tolist(), inside[2 * rank : 2 * rank + 2].tolist()]


def test_outputs_that_share_memory_with_inputs() -> None:
    gathered = [1.0, 2.0, 11.0, 12.0]
    first, second = ranks(2).run(overlapping)
    assert first == [gathered, [0.0, 1.0, 10.0, 11.0], [10.0, 12.0]]
    assert second == [gathered, [0.0, 1.0, 10.0, 11.0], [14.0, 16.0]]


def conjugated(rank: int, world_size: int) -> list[list[complex]]:
    """What is conjugated or negated by a bit, its memory being something else."""
    group, z = dist.distributed_c10d._get_default_group(), torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    gathered, pieces, shared = torch.zeros(4, dtype=z.dtype), torch.zeros_like(z), torch.zeros(2)
    group._allgather_base(gathered, z.conj()).wait()
    group.alltoall_base(pieces, z.conj(), [], []).wait()
    all_gather_single(shared, torch._neg_view(torch.tensor([float(rank + 1)])))
    return [gathered.tolist(), pieces.tolist(), shared.tolist()]


def test_tensors_whose_memory_is_not_their_value() -> None:
    first, second = ranks(2).run(conjugated)
    gathered = [1 - 2j, 3 + 1j, 2 - 4j, 6 + 2j]
    assert first == [gathered, [1 - 2j, 2 - 4j], [-1.0, -2.0]]
    assert second == [gathered, [3 + 1j, 6 + 2j], [-1.0, -2.0]]


def warmed(rank: int, world_size: int, path: str, kept: bool) -> tuple[bool, bool, float]:
    """Whether the loops were used before and after a group was warm; ``kept``: whether they are there already."""
    os.environ["UNISONO_FUSED"] = "1"
    all_there = dict(loops._ready)
    if not kept:
        loops._ready.clear()
        loops._searched.update(all_there)
        loops._load = lambda kind: loops._ready.update({kind: all_there[kind]})  # type: ignore[method-assign]
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    used: list[str] = []
    ways = loops.of
    loops.of = lambda kind: used.append(kind) or ways(kind)  # type: ignore[method-assign]
    x = torch.ones(4)
    for _ in range(COMPILE_AFTER - 1):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    before = "float32" in used
    for _ in range(4000):
        there = torch.tensor(float(loops.serve("float32", at_once=False)))
        dist.all_reduce(there, dist.ReduceOp.MIN)
        if there:
            break
    dist.barrier()
    dist.all_reduce(x)
    after = "float32" in used
    dist.destroy_process_group()
    del loops.of
    vars(loops).pop("_load", None)
    loops._ready.update(all_there)
    return before, after, x.sum().item()


@pytest.mark.parametrize("kept", [False, True])
def test_a_group_uses_loops_from_the_first_call_or_once_they_are_compiled(kept: bool, tmp_path: Path) -> None:
    assert ranks(2, group=False).run(warmed, str(tmp_path / "meeting"), kept) == [(kept, True, 8.0)] * 2


def test_what_cannot_be_compiled_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, tries = Loops(), []

    def fail(kind: str) -> None:
        tries.append(kind)
        raise OSError("no space left")

    monkeypatch.setattr(mine, "_load", fail)
    for _ in range(2):
        assert not mine.serve("int32", at_once=False)
        while mine._thread is not None:
            time.sleep(0.001)
    assert tries == ["int32"]
    assert [record.getMessage() for record in caplog.records] == [
        "torch's operations go on without compiled loops for int32: OSError: no space left"
    ]
    with pytest.raises(OSError, match="no space left"):
        mine.serve("int32", at_once=True)


def test_a_wrong_word_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_FUSED", "yes")
    with pytest.raises(UsageError, match=r"UNISONO_FUSED is 'yes', expected 0"):
        wanted()


NAMED = ("ring", "double_tree", "halving_doubling", "two_phase", "star")


def by_name(rank: int, world_size: int, path: str, modes: list[str]) -> list[bytes]:
    """Digests of what schedules give by name, in 16 bits and 32, in several pieces, deterministic and not."""
    os.environ["UNISONO_FUSED"] = modes[rank % len(modes)]
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for count in (1, 1000, 700_001):
            mine = inputs(dtype, count, world_size)[rank].nan_to_num(0.5, 0.25)
            for name in NAMED:
                for deterministic in (False, True) if count < 10_000 else (False,):
                    with unisono.algorithm(name, deterministic=deterministic):
                        x = mine.clone()
                        dist.all_reduce(x, dist.ReduceOp.AVG)
                    found.append(hashlib.blake2b(x.view(torch.uint8).numpy()).digest())
    dist.destroy_process_group()
    return found


def test_schedules_by_name(tmp_path: Path) -> None:
    pool = ranks(3, group=False)
    plain = pool.run(by_name, str(tmp_path / "plain"), ["0"])
    assert pool.run(by_name, str(tmp_path / "mixed"), ["now", "0"]) == plain
    assert pool.run(by_name, str(tmp_path / "loops"), ["now"]) == plain


class Shelf:
    """A store of one process."""

    def set(self, key: str, value: str) -> None: ...


def test_waiting_ends_soon_where_each_yield_takes_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a hundred yields would keep a waiter from looking whether its peers live for a second."""
    segment, fd = create(Shelf(), 2, "lonely")
    os.close(fd)
    monkeypatch.setenv("UNISONO_FUSED", "0")
    monkeypatch.setattr(futex, "OVERSUBSCRIBED_UNTIL", ctypes.c_int64(0))
    board = Board(segment, 0)
    queue = CollectiveQueue(board, [0, 1], "lonely", GroupMonitor(board, [0, 1], "lonely"))
    alone, yields = queue.preparer.meeting(), []

    def slow() -> None:
        yields.append(time.sleep(0.008))

    monkeypatch.setattr("os.sched_yield", slow)
    assert alone.run(alone.address, queue._at, 0, 1_000_000, 0, 0, 0) == WAITS
    assert len(yields) == 1
