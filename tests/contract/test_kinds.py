"""Tensors whose values do not lie in memory as they are: served, or refused on every rank; the group stays usable."""

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import unisono
from contract.test_refusals import messages
from ranks import ranks

DTYPES = (torch.float32, torch.int16)  # one that compiled loops take, one that they do not


def freed(dtype: torch.dtype, nbytes: int = 0, *, strided: bool = False) -> torch.Tensor:
    x = torch.ones(4, 2, dtype=dtype)[:, 0] if strided else torch.ones(4, dtype=dtype)
    x.untyped_storage().resize_(nbytes)
    return x


def distributed(dtype: torch.dtype) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(4, dtype=dtype), mesh, [Shard(0)])


ODD: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "DTensor": distributed,
    "TwoTensor": lambda dtype: TwoTensor(torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype)),
    "FakeTensor": lambda dtype: FakeTensorMode().from_tensor(torch.ones(4, dtype=dtype)),
    "zero tensor": lambda dtype: torch._efficientzerotensor((4,), dtype=dtype),
    "nested": lambda dtype: torch.nested.nested_tensor([torch.ones(1, dtype=dtype), torch.ones(3, dtype=dtype)]),
    "sparse_csr": lambda dtype: torch.eye(2, dtype=dtype).to_sparse_csr(),
    "resized to 0": freed,
    "of its storage": lambda dtype: freed(dtype, strided=True),
}


def calls(mine: torch.Tensor, usual: torch.Tensor) -> Iterable[tuple[str, Callable[[], object]]]:
    """Every sort of call in which a rank gives ``mine``, and one in which it is written."""
    size = dist.get_world_size()
    yield "all_reduce", lambda: dist.all_reduce(mine)
    yield "all_reduce, async", lambda: dist.all_reduce(mine, async_op=True).wait()
    yield "broadcast", lambda: dist.broadcast(mine, 0)
    yield "all_gather", lambda: dist.all_gather([usual.clone() for _ in range(size)], mine)
    yield "reduce_scatter", lambda: dist.reduce_scatter(usual.clone(), [mine] * size)


def refused(rank: int, world_size: int, name: str) -> dict[str, str]:
    """Rank 0 gives a tensor of an odd kind."""
    seen = {}
    for dtype in DTYPES:
        usual = torch.ones(4, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has plans with some of these kinds
            mine = ODD[name](dtype)
        for what, call in calls(mine if rank == 0 else usual, usual):
            seen |= messages({f"{what} of {dtype}": call})
    return seen


def results_of_functional_collectives(rank: int, world_size: int) -> list[list[float]]:
    """Pass what a functional collective gives, which torch unwraps, to every sort of call."""
    seen = []
    for dtype in DTYPES:
        for at in range(4):
            mine = funcol.all_reduce(torch.ones(4, dtype=dtype), "sum", dist.group.WORLD)
            list(calls(mine, torch.ones(4, dtype=dtype)))[at][1]()
            seen.append(mine.tolist())
    return seen


def unknown_dtypes(rank: int, world_size: int) -> list[object]:
    """Move and reduce dtypes that torch knows little of, then mistake one for another."""
    mine = torch.arange(4, dtype=torch.uint8).add(rank).view(torch.float4_e2m1fn_x2)
    other = torch.arange(4, dtype=torch.uint8).view(torch.bits8 if rank else torch.float4_e2m1fn_x2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaled = torch.quantize_per_tensor(torch.ones(4), 0.5 + rank, 0, torch.quint8)
    said = messages(
        {
            "sum": lambda: dist.all_reduce(mine),
            "mistaken": lambda: dist.broadcast(other, 0),
            "quantised": lambda: dist.broadcast(scaled, 0),
        }
    )
    dist.broadcast(mine, 1)
    return [mine.view(torch.uint8).tolist(), said]


@pytest.mark.parametrize("name", ODD)
def test_tensors_without_memory_of_their_own(name: str) -> None:
    first, second = ranks(2, group_timeout=10).run(refused, name)
    assert len(first) == 2 * 5
    for what, text in first.items():
        assert text.startswith("UsageError"), f"{what}: {text}"
        assert name in text, f"{what}: {text}"
        assert second[what].startswith(("UsageError", "MismatchError")), f"{what}: {second[what]}"
        assert name in second[what]


def test_results_of_functional_collectives() -> None:
    gathered, moved = [2.0] * 4, [4.0] * 4
    for seen in ranks(2).run(results_of_functional_collectives):
        assert seen == [moved, moved, gathered, gathered] * 2


def test_dtypes_that_torch_knows_little_of() -> None:
    for bits, said in ranks(2).run(unknown_dtypes):
        assert bits == [1, 2, 3, 4]
        assert "SUM is not defined for float4_e2m1fn_x2" in said["sum"]
        assert "quantised" in said["quantised"]
        assert said["mistaken"].startswith("MismatchError")
        assert "bits8 [4]" in said["mistaken"]


def fitting_for_nobody(rank: int, world_size: int) -> list[str]:
    """Every rank makes the same call, whose pieces do not fit together; then in-place exchanges by name."""
    x = torch.arange(3.0) + 10 * rank
    said = messages(
        {
            "exchange": lambda: dist.all_to_all_single(torch.zeros(3), x, [1, 2], [1, 2]),
            "gathering": lambda: dist.all_gather([torch.empty(1), torch.empty(2)], torch.ones(1)),
        }
    )
    dist.barrier()
    return [said["exchange"], said["gathering"]]


def test_the_same_call_everywhere_that_does_not_fit_together() -> None:
    for exchange, gathering in ranks(2).run(fitting_for_nobody):
        assert exchange.startswith("MismatchError")
        assert "rank 0 sends 2 elements to rank 1, which expects 1" in exchange
        assert gathering.startswith("MismatchError")


def in_place_by_name(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for name in ("bruck", "shift", "pairwise", "direct"):
        x = torch.arange(2.0 * world_size) + 100 * rank
        with unisono.algorithm(name):
            dist.all_to_all_single(x, x)
        found.append(x.tolist())
    return found


@pytest.mark.parametrize("world_size", [3, 4])
def test_exchanges_in_place_by_name(world_size: int) -> None:
    for rank, results in enumerate(ranks(world_size).run(in_place_by_name)):
        expected = [100.0 * peer + 2 * rank + k for peer in range(world_size) for k in (0, 1)]
        assert results == [expected] * 4
