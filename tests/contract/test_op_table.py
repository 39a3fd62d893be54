"""Which reduce op takes which dtype, and what it gives: as NCCL, else as Gloo, and as docs/backend.md says in a table.

Gloo is asked in the same ranks. NCCL needs GPUs: its rules are written down here, from its documentation and from what
torch's group of it maps dtypes and ops to.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import unisono
from contract.reference import reduce as exact_reduction
from contract.values import DTYPES, FLOATS, INTEGERS, OPS, reduce_op, same_bytes
from ranks import ranks
from unisono.torch_names import reduce_scatter_single

NCCL_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
NCCL_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NCCL_COMPLEX = (torch.complex64, torch.complex128)
ASKED = tuple(dtype for dtype in DTYPES if dtype is not torch.complex32)  # which torch warns of wherever it is made
BITS = ("BAND", "BOR", "BXOR")
Parts = list[torch.Tensor]


def nccl(op: str, parts: Parts) -> torch.Tensor | None:
    """What NCCL gives, None where it or torch's group of it refuses. Sums of these values are exact in every dtype."""
    dtype = parts[0].dtype
    if op in BITS or dtype not in (*FLOATS, *NCCL_INTEGERS, *NCCL_FLOAT8, *NCCL_COMPLEX, torch.bool):
        return None
    if dtype in NCCL_COMPLEX:  # a tensor of twice as many floats, where that is the same
        halves = nccl(op, [torch.view_as_real(part) for part in parts]) if op in ("SUM", "AVG", "PREMUL_SUM") else None
        return None if halves is None else torch.view_as_complex(halves)
    if op == "PREMUL_SUM" and dtype not in FLOATS:
        return None
    if dtype is torch.bool:
        if op == "AVG":
            return None
        either, both = functools.reduce(torch.logical_or, parts), functools.reduce(torch.logical_and, parts)
        return both if op in ("MIN", "PRODUCT") else either
    if dtype in NCCL_INTEGERS:
        total = exact_reduction("SUM" if op == "AVG" else op, parts)
        return total.div(len(parts), rounding_mode="trunc") if op == "AVG" else total
    stacked = torch.stack([part.double() * (0.5 if op == "PREMUL_SUM" else 1) for part in parts])
    made = {"PRODUCT": stacked.prod, "MIN": stacked.amin, "MAX": stacked.amax, "AVG": stacked.mean}
    return made.get(op, stacked.sum)(0).to(dtype)


def part(dtype: torch.dtype, rank: int, count: int = 8) -> torch.Tensor:
    """Small values of both signs; of integers some that wrap, and sums that no world size divides."""
    values = torch.tensor([1, 2, 0.5, 4, -1, 0.25, -2, 1]).roll(rank)
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        low, high = -(7 + 3 * rank) if limits.min else 7 + 3 * rank, limits.max - 2 * rank
        cells = [low, high, limits.min, limits.max, 5 - rank, 3 * rank, 1, -(1 + rank) if limits.min else 1 + rank]
        return torch.tensor((cells * (count // 8 + 1))[:count], dtype=dtype)
    if dtype is torch.bool:
        values = torch.tensor([True, False, rank == 0, rank > 0] * 2)
    return values.repeat(count // 8 + 1)[:count].to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes, for torch cannot pickle every dtype."""
    return x.contiguous().view(torch.uint8)


def attempt(call: Callable[[], torch.Tensor]) -> torch.Tensor | str:
    try:
        return raw(call())
    except (RuntimeError, ValueError) as error:
        return str(error)


def all_reduced(x: torch.Tensor, op: Any, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, op, group=group)
    return x


def answers(rank: int, world_size: int) -> dict[tuple[str, torch.dtype], tuple[Any, Any]]:
    """What unisono and Gloo give for every op and dtype, or the words with which they refuse."""
    gloo = dist.new_group(backend="gloo")
    found = {}
    for op in OPS:
        for dtype in ASKED:
            x, torchs = part(dtype, rank), reduce_op(op)
            mine = attempt(lambda x=x, op=torchs: all_reduced(x, op))
            theirs = attempt(lambda x=x, op=torchs: all_reduced(x, op, gloo))
            found[op, dtype] = (mine, theirs)
    dist.destroy_process_group(gloo)
    return found


@pytest.mark.parametrize("world_size", [2, 3], indirect=True)
def test_what_nccl_or_gloo_take_gives_their_values(world_size: int) -> None:
    for found in ranks(world_size).run(answers):
        for (op, dtype), (mine, gloo) in found.items():
            wanted = nccl(op, [part(dtype, rank) for rank in range(world_size)])
            if wanted is None and isinstance(gloo, torch.Tensor):
                wanted = gloo.view(dtype)
            if wanted is not None:
                assert isinstance(mine, torch.Tensor), f"{op} of {dtype}: {mine}"
                mine = mine.view(dtype)
                if (
                    op == "AVG" and dtype not in INTEGERS
                ):  # whether a sum is divided, or its parts, shows in the last bit
                    tolerance = 2 * torch.finfo(dtype).eps
                    assert torch.allclose(mine.to(torch.complex128), wanted.to(torch.complex128), tolerance, 0), (
                        op,
                        dtype,
                    )
                else:
                    assert same_bytes(mine, wanted), f"{op} of {dtype}: {mine.tolist()}, not {wanted.tolist()}"
            if isinstance(mine, str):
                assert "\n" not in mine, f"{op} of {dtype}: {mine}"


def documented() -> dict[tuple[str, torch.dtype], str]:
    """The cells of the table in docs/backend.md."""
    text = (Path(__file__).parents[2] / "docs" / "backend.md").read_text()
    head, _, *rows = re.findall(r"^\|.*\|$", text.partition("<!-- ops -->")[2].partition("<!-- end -->")[0], re.M)
    columns = [cell.split(", ") for cell in head.strip("| ").split(" | ")[1:]]
    cells = {}
    for row in rows:
        names, *signs = (cell.strip() for cell in row.strip("|").split("|"))
        for ops, sign in zip(columns, signs, strict=True):
            cells |= {(op, getattr(torch, name)): sign for op in ops for name in names.split(", ")}
    return cells


def test_the_documented_table() -> None:
    """``N``, ``G``: NCCL's, Gloo's group takes it; ``+``: unisono alone does; ``-``: none."""
    found = ranks(2).run(answers)[0]
    signs = {}
    for (op, dtype), (mine, gloo) in found.items():
        sign = "N" * (nccl(op, [part(dtype, 0)] * 2) is not None) + "G" * isinstance(gloo, torch.Tensor)
        signs[op, dtype] = sign or ("-" if isinstance(mine, str) else "+")
    assert documented() == signs


def averaged(rank: int, world_size: int, dtype: torch.dtype, count: int) -> list[tuple[str, torch.Tensor]]:
    """The mean of ``count`` integers by every call that reduces; sliced to what this rank has of it."""
    average, x = dist.ReduceOp.AVG, part(dtype, rank, count)
    work = dist.all_reduce(later := x.clone(), average, async_op=True)
    work.wait()
    dist.reduce(rooted := x.clone(), 0, average)
    again = x.clone()
    call = unisono.prepare("all_reduce", again, op=average)
    call()
    first, second = x.clone(), x.clone()
    with dist._coalescing_manager():
        dist.all_reduce(first, average)
        dist.all_reduce(second, average)
    dist.all_reduce((strided := torch.stack([x, x], 1))[:, 1], average)
    found = [("async", later), ("prepared", again), ("coalesced", first), ("coalesced", second)]
    found += [("strided", strided[:, 1]), ("functional", functional.all_reduce(x, "avg", dist.group.WORLD).wait())]
    found += [("reduce", rooted)] if rank == 0 else []
    with unisono.algorithm("ring"):
        found.append(("ring", all_reduced(x, average)))
    shared = unisono.empty(count, dtype=dtype)
    for _ in range(2):  # staged, then directly
        shared.copy_(x)
        dist.all_reduce(shared, average)
    return [(name, raw(mean)) for name, mean in (*found, ("shared", shared))]


def scattered(rank: int, world_size: int, dtype: torch.dtype, count: int) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of the mean of ``count`` integers per rank, by every reduce_scatter."""
    average, whole = dist.ReduceOp.AVG, part(dtype, rank, count * world_size)
    single, listed, one = (torch.empty(count, dtype=dtype) for _ in range(3))
    reduce_scatter_single(single, whole.clone(), average)
    dist.reduce_scatter(listed, list(whole.clone().chunk(world_size)), average)
    with dist._coalescing_manager():
        reduce_scatter_single(one, whole.clone(), average)
    return [("single", raw(single)), ("listed", raw(listed)), ("coalesced", raw(one))]


@pytest.mark.parametrize("count", [8, 100_000])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_call_averages_integers(dtype: torch.dtype, count: int) -> None:
    inputs = [part(dtype, rank, 3 * count) for rank in range(3)]
    wanted = exact_reduction("AVG", [x[:count] for x in inputs])
    for rank, found in enumerate(ranks(3).run(averaged, dtype, count)):
        for name, mean in found:
            assert torch.equal(mean, raw(wanted)), f"{name}, rank {rank}: {mean.view(dtype)[:8]}, not {wanted[:8]}"
    shares = exact_reduction("AVG", inputs).chunk(3)
    for share, found in zip(shares, ranks(3).run(scattered, dtype, count), strict=True):
        assert [name for name, mine in found if not torch.equal(mine, raw(share))] == []


def hooked(rank: int, world_size: int) -> list[int]:
    """DDP whose hook averages counts beside the gradients."""
    model, counts = DistributedDataParallel(torch.nn.Linear(2, 2)), []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        count = torch.tensor([8 + rank, -8 - rank])
        counts.append(count)
        dist.all_reduce(count, dist.ReduceOp.AVG, async_op=True).wait()
        buffer = bucket.buffer()
        done = dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True).get_future()
        return done.then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 2)).sum().backward()
    return counts[0].tolist()


def test_a_hook_of_ddp_averages_counts() -> None:
    assert ranks(2).run(hooked) == [[8, -8]] * 2
