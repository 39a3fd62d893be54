"""What floats need beyond exact sums: the same bits on all ranks, one rounding, NaN that does not get lost."""

import functools
import hashlib

import pytest
import torch
import torch.distributed as dist

from ranks import ranks

COUNTS = (1, 3, 1000, 5001, 70_001, 270_007)  # small messages, and pieces that no staging area divides evenly
LOW = (torch.bfloat16, torch.float16)


@functools.cache
def _noise(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(2).exp()


def noise(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random values of very different magnitudes, so that the order of a sum shows in its last bits."""
    return _noise(rank, count).to(dtype, copy=True)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def sums(rank: int, world_size: int) -> list[str]:
    """Return the digests of what this rank got for every size, dtype and op, twice."""
    seen = []
    for dtype in (torch.float32, torch.float64, *LOW):
        for count in COUNTS:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
                runs = []
                for _ in range(2):
                    x = noise(rank, count, dtype)
                    dist.all_reduce(x, op)
                    runs.append(digest(x))
                assert runs[0] == runs[1], f"{dtype}, {count} elements, {op}: another result the second time"
                seen.append(runs[0])
    return seen


def close_to_exact(rank: int, world_size: int) -> list[float]:
    """Return the largest error of a float32 sum in units of eps times the sum of magnitudes."""
    errors = []
    for count in COUNTS:
        x = noise(rank, count)
        dist.all_reduce(x)
        terms = torch.stack([noise(r, count).double() for r in range(world_size)])
        scale = torch.finfo(torch.float32).eps * terms.abs().sum(0)
        errors.append(((x.double() - terms.sum(0)).abs() / scale).max().item())
    return errors


def split_and_fused(rank: int, world_size: int) -> list[bool]:
    """Reduce a tensor whole, in pieces of every sort, coalesced and strided: element by element the same bits."""
    same = []
    for count in COUNTS:
        whole = noise(rank, count)
        pieces = noise(rank, count)
        coalesced = noise(rank, count)
        strided = torch.zeros(count, 2)
        strided[:, 1] = whole
        dist.all_reduce(whole)
        for piece in pieces.split(max(1, count // 7)):
            dist.all_reduce(piece)
        with dist._coalescing_manager():
            for piece in coalesced.split(max(1, count // 3)):
                dist.all_reduce(piece)
        dist.all_reduce(strided[:, 1])
        same += [torch.equal(whole, other) for other in (pieces, coalesced, strided[:, 1])]
    return same


def scattered_and_whole(rank: int, world_size: int) -> list[bool]:
    """Return whether reduce_scatter and reduce give the very bits that all_reduce gives."""
    same = []
    for count in COUNTS:
        x = noise(rank, count * world_size)
        whole = x.clone()
        dist.all_reduce(whole)
        mine = torch.empty(count)
        dist.reduce_scatter_tensor(mine, x)
        dist.reduce(x, dst=world_size - 1)
        same += [torch.equal(mine, whole.chunk(world_size)[rank]), rank != world_size - 1 or torch.equal(x, whole)]
    return same


def low_precision(rank: int, world_size: int) -> list[str]:
    """Compare 16-bit sums and averages with a float32 sum rounded once, for values whose float32 sum is exact."""
    problems = []
    for dtype in LOW:
        for count in (5, 4096, 100_000):
            inputs = [
                (torch.randint(1024, 2048, (count,), generator=torch.Generator().manual_seed(r * 7 + count)) / 512).to(
                    dtype
                )
                for r in range(world_size)
            ]
            exact = torch.stack(inputs).double().sum(0)
            shards = torch.cat([inputs[rank]] * world_size)
            for op, wanted in ((dist.ReduceOp.SUM, exact), (dist.ReduceOp.AVG, exact / world_size)):
                x, mine, rooted = inputs[rank].clone(), torch.empty(count, dtype=dtype), inputs[rank].clone()
                dist.all_reduce(x, op)
                dist.reduce_scatter_tensor(mine, shards, op)
                dist.reduce(rooted, 0, op)
                for name, got in (("all_reduce", x), ("reduce_scatter", mine), ("reduce", rooted)):
                    if name == "reduce" and rank:
                        continue
                    if not torch.equal(got, wanted.float().to(dtype)):
                        problems.append(f"{name} {op} {dtype} {count}: {got[:4].tolist()}, not {wanted[:4].tolist()}")
    return problems


def nan_and_infinity(rank: int, world_size: int) -> list[list[str]]:
    """Return MIN and MAX over [NaN on the last rank, NaN everywhere, infinity on rank 0, -infinity there, the rank]."""
    rows = []
    for dtype in (torch.float32, torch.float64, *LOW):
        last, first = rank == world_size - 1, rank == 0
        special = [torch.nan if last else 1.0, torch.nan, torch.inf if first else 0.0, -torch.inf if first else 0.0]
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for repeat in (1, 20_000):
                x = torch.tensor([*special, float(rank)], dtype=dtype).repeat(repeat)
                dist.all_reduce(x, op)
                assert torch.equal(x.view(repeat, 5).nan_to_num(7), x[:5].expand(repeat, 5).nan_to_num(7))
                rows.append([str(v) for v in x[:5].tolist()])
    return rows


several = pytest.mark.parametrize("world_size", [3, 4, 5, 8], indirect=True)


@several
def test_all_ranks_hold_the_same_bits_run_after_run(world_size: int) -> None:
    first, *others = ranks(world_size).run(sums)
    assert others == [first] * (world_size - 1)


@several
def test_sums_are_as_exact_as_their_dtype(world_size: int) -> None:
    assert all(error <= world_size for errors in ranks(world_size).run(close_to_exact) for error in errors)


@several
def test_splitting_or_fusing_tensors_changes_no_bit(world_size: int) -> None:
    assert all(all(same) for same in ranks(world_size).run(split_and_fused))


@several
def test_every_reduction_gives_the_same_bits(world_size: int) -> None:
    assert all(all(same) for same in ranks(world_size).run(scattered_and_whole))


@several
def test_sixteen_bit_floats_are_summed_in_float32(world_size: int) -> None:
    assert ranks(world_size).run(low_precision) == [[]] * world_size


@several
def test_nan_and_infinity_survive(world_size: int) -> None:
    smallest = ["nan", "nan", "0.0", "-inf", "0.0"]
    largest = ["nan", "nan", "inf", "0.0", f"{world_size - 1}.0"]
    expected = ([smallest] * 2 + [largest] * 2) * 4
    assert ranks(world_size).run(nan_and_infinity) == [expected] * world_size
