"""torch.distributed.nn and the differentiable functional collectives: values and gradients against one process.

The reference holds every rank's input in one autograd graph and writes each collective as plain tensor operations.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import names
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dnn
from torch import Tensor

from ranks import ranks

ROOT = 1
WIDTH = 3


class Case(NamedTuple):
    """A collective twice: as one rank calls it, and as plain operations from all inputs to all outputs."""

    distributed: Callable[[Tensor, int, int], Tensor]
    plain: Callable[[list[Tensor]], list[Tensor | None]]
    """An output None means that the rank's result is unspecified, so it takes no part in the objective."""


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def exchange(xs: list[Tensor]) -> list[Tensor | None]:
    return [torch.cat([x.chunk(len(xs))[rank] for x in xs]) for rank in range(len(xs))]


def splits(rank: int, world_size: int) -> list[int]:
    """Rows that rank sends to each peer: uneven, some none, 2 * world_size in all."""
    rows = [0] * world_size
    for index in range(2 * world_size):
        rows[(rank + index * index) % world_size] += 1
    return rows


def uneven_exchange(xs: list[Tensor]) -> list[Tensor | None]:
    parts = [x.split(splits(rank, len(xs))) for rank, x in enumerate(xs)]
    return [torch.cat([parts[source][rank] for source in range(len(xs))]) for rank in range(len(xs))]


def received(rank: int, world_size: int) -> list[int]:
    return [splits(source, world_size)[rank] for source in range(world_size)]


def nn_reduce_scatter(x: Tensor, rank: int, n: int) -> Tensor:
    return dnn.reduce_scatter(torch.empty(2, WIDTH, dtype=x.dtype), list(x.chunk(n)))


def nn_all_to_all(x: Tensor, rank: int, n: int) -> Tensor:
    outputs = [torch.empty(rows, WIDTH, dtype=x.dtype) for rows in received(rank, n)]
    return torch.cat(dnn.all_to_all(outputs, list(x.split(splits(rank, n)))))


def nn_all_to_all_single(x: Tensor, rank: int, n: int) -> Tensor:
    output = torch.empty(sum(received(rank, n)), WIDTH, dtype=x.dtype)
    return dnn.all_to_all_single(output, x, received(rank, n), splits(rank, n))


def only_root(xs: list[Tensor], value: Tensor) -> list[Tensor | None]:
    return [value if rank == ROOT else None for rank in range(len(xs))]


CASES = {
    "nn.broadcast": Case(lambda x, r, n: dnn.broadcast(x, ROOT), lambda xs: [xs[ROOT]] * len(xs)),
    "nn.all_reduce": Case(lambda x, r, n: dnn.all_reduce(x), lambda xs: [total(xs)] * len(xs)),
    "nn.reduce": Case(lambda x, r, n: dnn.reduce(x, ROOT), lambda xs: only_root(xs, total(xs))),
    "nn.gather": Case(lambda x, r, n: torch.cat(dnn.gather(x, ROOT)), lambda xs: only_root(xs, torch.cat(xs))),
    "nn.scatter": Case(lambda x, r, n: dnn.scatter(list(x.chunk(n)), ROOT), lambda xs: list(xs[ROOT].chunk(len(xs)))),
    "nn.all_gather": Case(lambda x, r, n: torch.cat(dnn.all_gather(x)), lambda xs: [torch.cat(xs)] * len(xs)),
    "nn.reduce_scatter": Case(nn_reduce_scatter, lambda xs: list(total(xs).chunk(len(xs)))),
    "nn.all_to_all": Case(nn_all_to_all, uneven_exchange),
    "nn.all_to_all_single": Case(nn_all_to_all_single, uneven_exchange),
    "all_reduce": Case(
        lambda x, r, n: functional.all_reduce(x, "sum", dist.group.WORLD),
        lambda xs: [total(xs)] * len(xs),
    ),
    "all_gather": Case(
        lambda x, r, n: names.all_gather_single_autograd(x, 0, dist.group.WORLD),
        lambda xs: [torch.cat(xs)] * len(xs),
    ),
    "all_gather on dim 1": Case(
        lambda x, r, n: names.all_gather_single_autograd(x, 1, dist.group.WORLD),
        lambda xs: [torch.cat(xs, 1)] * len(xs),
    ),
    "reduce_scatter": Case(
        lambda x, r, n: names.reduce_scatter_single_autograd(x, "sum", 0, dist.group.WORLD),
        lambda xs: list(total(xs).chunk(len(xs))),
    ),
    "all_to_all": Case(
        lambda x, r, n: functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD),
        exchange,
    ),
    "uneven all_to_all": Case(
        lambda x, r, n: functional.all_to_all_single_autograd(x, received(r, n), splits(r, n), dist.group.WORLD),
        uneven_exchange,
    ),
}


def make_input(rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2 * world_size, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def weighted(output: Tensor, rank: int) -> Tensor:
    """This rank's part of the objective, different for every rank and element."""
    weights = torch.linspace(1, 2 + rank, output.numel(), dtype=output.dtype)
    return (output.flatten() ** 2 * weights).sum()


def run_cases(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    results = {}
    for name, case in CASES.items():
        x = make_input(rank, world_size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deprecated")  # what torch says of torch.distributed.nn
            output = case.distributed(x, rank, world_size)
        unspecified = name in ("nn.reduce", "nn.gather") and rank != ROOT
        (weighted(output, rank) * (0 if unspecified else 1)).backward()
        results[name] = output.detach().clone(), x.grad
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_and_gradients(world_size: int) -> None:
    results = ranks(world_size).run(run_cases)
    for name, case in CASES.items():
        xs = [make_input(rank, world_size) for rank in range(world_size)]
        outputs = case.plain(xs)
        sum(weighted(output, rank) for rank, output in enumerate(outputs) if output is not None).backward()
        for rank, (output, x) in enumerate(zip(outputs, xs, strict=True)):
            actual, gradient = results[rank][name]
            expected = torch.zeros_like(x) if x.grad is None else x.grad
            torch.testing.assert_close(
                gradient, expected, rtol=1e-12, atol=1e-12, msg=f"gradient of {name}, rank {rank}"
            )
            if output is not None:
                torch.testing.assert_close(actual, output.detach(), rtol=1e-12, atol=1e-12, msg=f"{name}, rank {rank}")
