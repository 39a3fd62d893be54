"""Lists, coalesced calls, reduce, gather and scatter by kernels on two GPUs, beside a CPU group's values."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from gpu.world import NEEDS_GPU
from ranks import ranks

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
COUNTS = (1, 1000, 33_334, 1 << 19)


def data(rank: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(rank)
    return [torch.randn(*shape, generator=chance).to(torch.bfloat16) for shape in shapes]


def gather(device: str, rank: int, n: int) -> list[torch.Tensor]:
    (x,) = (t.to(device) for t in data(rank, (n,)))
    outs = [torch.zeros_like(x) for _ in range(2)]
    dist.gather(x, outs if rank == 1 else None, dst=1)
    return outs


def scatter(device: str, rank: int, n: int) -> list[torch.Tensor]:
    xs = [t.to(device) for t in data(rank, (n,), (n,))]
    out = torch.zeros_like(xs[0])
    dist.scatter(out, xs if rank == 0 else None, src=0)
    return [out]


def reduce(device: str, rank: int, n: int) -> list[torch.Tensor]:
    (x,) = (t.to(device) for t in data(rank, (n,)))
    kept = x.clone()
    dist.reduce(x, 1)
    assert rank == 1 or torch.equal(x, kept)
    return [x] if rank == 1 else []


def all_gather(device: str, rank: int, n: int) -> list[torch.Tensor]:
    (x,) = (t.to(device) for t in data(rank, (n,)))
    apart, together = [torch.zeros_like(x) for _ in range(2)], list(torch.zeros(2, n, dtype=x.dtype, device=device))
    dist.all_gather(apart, x)
    dist.all_gather(together, x, async_op=True).wait()
    return [*apart, *together]


def reduce_scatter(device: str, rank: int, n: int) -> list[torch.Tensor]:
    xs = [t.to(device) for t in data(rank, (n,), (n,))]
    out = torch.zeros_like(xs[0])
    dist.reduce_scatter(out, xs)
    return [out]


def coalesced(device: str, rank: int, n: int) -> list[torch.Tensor]:
    xs = [t.to(device) for t in data(rank, (n,), (2, 3), (n, 2))]
    sums, wide = [x.clone() for x in xs], [torch.cat([x, x + 1]) for x in xs]
    with warnings.catch_warnings(action="ignore"):  # later releases have other names
        dist.all_reduce_coalesced(sums, async_op=True).wait()
        gathered = functional.all_gather_into_tensor_coalesced(xs, dist.group.WORLD)
        scattered = functional.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0, 0], dist.group.WORLD)
    return [*sums, *(functional.wait_tensor(t) for t in (*gathered, *scattered))]


CALLS: dict[str, Callable[[str, int, int], list[torch.Tensor]]] = {
    "gather": gather, "scatter": scatter, "reduce": reduce, "all_gather": all_gather,
    "reduce_scatter": reduce_scatter, "coalesced": coalesced,
}  # fmt: skip


def differing(rank: int, world_size: int, name: str) -> list[Any]:
    """The counts whose results differ from a CPU group's, or were not given by a kernel."""
    torch.cuda.set_device(rank)
    wrong: list[Any] = []
    for count in COUNTS:
        known = dict(dist.group.WORLD._cuda._launches)  # type: ignore[union-attr]
        found = CALLS[name]("cuda", rank, count)
        launched = len(dist.group.WORLD._cuda._launches) > len(known)  # type: ignore[union-attr]
        wanted = CALLS[name]("cpu", rank, count)
        if not launched:
            wrong.append(f"{count}: no kernel")
        if not all(torch.equal(x.cpu(), y) for x, y in zip(found, wanted, strict=True)):
            wrong.append(count)
    return wrong


@pytest.mark.parametrize("name", CALLS)
def test_the_values_of_a_cpu_group(name: str) -> None:
    assert ranks(2).run(differing, name, timeout=200) == [[], []]


def uneven(rank: int, world_size: int) -> list[list[float]]:
    """What NCCL carries: pieces that differ."""
    torch.cuda.set_device(rank)
    x = torch.full((3 + rank,), float(rank), device="cuda")
    outs = [torch.zeros(3, device="cuda"), torch.zeros(4, device="cuda")]
    dist.all_gather(outs, x)
    pieces = [torch.full((1 + 2 * rank + k,), float(10 * rank + k), device="cuda") for k in range(2)]
    into = [torch.zeros(1 + 2 * k + rank, device="cuda") for k in range(2)]
    dist.all_to_all(into, pieces)
    return [t.tolist() for t in (*outs, *into)]


def test_uneven_pieces_by_nccl() -> None:
    found = ranks(2).run(uneven, timeout=200)
    assert [row[:2] for row in found] == [[[0.0] * 3, [1.0] * 4]] * 2
    assert found[0][2:] == [[0.0], [10.0] * 3]
    assert found[1][2:] == [[1.0] * 2, [11.0] * 4]
