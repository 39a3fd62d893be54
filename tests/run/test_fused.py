"""Compiled loops give the bits of torch's operations, whoever uses them, in the background as in the foreground."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.collectives import all_gather_single, reduce_scatter_single
from unisono.run.loops import WARM, loops, wanted

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
COUNTS = (0, 1, 2049, 300_001)


def inputs(dtype: torch.dtype, count: int, world_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    made = [(torch.randn(count, generator=generator) * 3).to(dtype) for _ in range(world_size)]
    if dtype.is_floating_point and count > 2:
        made[0][1], made[-1][2] = float("nan"), float("inf")
    return made


def results(rank: int, world_size: int, path: str, modes: list[str]) -> list[bytes]:
    """Digests of the bytes that every call gives; NaNs made one."""
    os.environ["UNISONO_FUSED"] = modes[rank % len(modes)]
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    found = []

    def keep(x: torch.Tensor) -> None:
        if x.is_floating_point():
            x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
        found.append(hashlib.blake2b(x.view(torch.uint8).numpy()).digest())

    for dtype in DTYPES:
        for count in COUNTS:
            mine = inputs(dtype, count, world_size)[rank]
            for op in OPS:
                if op == "AVG" and not dtype.is_floating_point:
                    continue
                x = mine.clone()
                work = dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=count % 2 == 1)
                if work is not None:
                    work.wait()
                keep(x)
                part = torch.empty(count // world_size, dtype=dtype)
                whole = mine[: part.numel() * world_size].clone()
                reduce_scatter_single(part, whole, getattr(dist.ReduceOp, op))
                keep(part)
            gathered = torch.empty(count * world_size, dtype=dtype)
            all_gather_single(gathered, mine)
            keep(gathered)
            pieces = torch.empty_like(whole)
            dist.all_to_all_single(pieces, whole)
            keep(pieces)
            dist.broadcast(mine, count % world_size)
            keep(mine)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_torchs_operations(world_size: int, tmp_path: Path) -> None:
    pool = ranks(world_size, group=False)
    plain = pool.run(results, str(tmp_path / "plain"), ["0"])
    assert pool.run(results, str(tmp_path / "mixed"), ["now", "0"]) == plain
    assert pool.run(results, str(tmp_path / "loops"), ["now"]) == plain


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


def warmed(rank: int, world_size: int, path: str) -> tuple[bool, bool, float]:
    """Whether the loops were used before and after a group was warm."""
    os.environ["UNISONO_FUSED"] = "1"
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    lane = dist.distributed_c10d._get_default_group()._group.collectives
    used: list[int] = []
    run = lane._run
    lane._run = lambda *args: used.append(lane.calls) or run(*args)
    x = torch.ones(4)
    for _ in range(WARM - 1):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    before = bool(used)
    for _ in range(4000):
        dist.all_reduce(x, dist.ReduceOp.MAX)
        if loops.serve("float32", at_once=False):
            break
    dist.barrier()
    dist.all_reduce(x)
    after = bool(used)
    dist.destroy_process_group()
    return before, after, x.sum().item()


def test_a_group_begins_without_and_changes_over_once_warm(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(warmed, str(tmp_path / "meeting")) == [(False, True, 8.0)] * 2


def test_a_wrong_word_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_FUSED", "yes")
    with pytest.raises(UsageError, match=r"UNISONO_FUSED is 'yes', expected 0"):
        wanted()
