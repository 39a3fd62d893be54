"""torch's functional collectives, eager and compiled, give the values of one process."""

from collections.abc import Callable
from typing import NamedTuple

import names
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from small import STEPS, Training, assert_same_training, make_model, my_batch, sgd, train_alone, training
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ranks import ranks

ROWS = 24  # divides by 2, 3 and 4


def data(rank: int) -> Tensor:
    """[ROWS, 4] float64, small whole numbers so that every reduction is exact."""
    return torch.arange(ROWS * 4, dtype=torch.float64).reshape(ROWS, 4) % 7 + rank


class Case(NamedTuple):
    """A collective as one rank calls it, and rank r's result computed from all inputs."""

    distributed: Callable[[Tensor], Tensor]
    plain: Callable[[list[Tensor], int], Tensor]


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def shifted(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    return functional.permute_tensor(x.flatten(), [(rank + 1) % n for rank in range(n)], world()).reshape(x.shape)


def reduced(name: str) -> Case:
    plain = {
        "sum": lambda xs: xs.sum(0),
        "avg": lambda xs: xs.mean(0),
        "product": lambda xs: xs.prod(0),
        "max": lambda xs: xs.amax(0),
        "min": lambda xs: xs.amin(0),
    }[name]
    return Case(lambda x: functional.all_reduce(x, name, world()), lambda xs, r: plain(torch.stack(xs)))


CASES = {
    **{f"all_reduce {name}": reduced(name) for name in ("sum", "avg", "product", "max", "min")},
    "broadcast": Case(lambda x: functional.broadcast(x, 1, world()), lambda xs, r: xs[1]),
    "all_gather": Case(lambda x: names.all_gather_single(x, 0, world()), lambda xs, r: torch.cat(xs)),
    "all_gather dim 1": Case(lambda x: names.all_gather_single(x, 1, world()), lambda xs, r: torch.cat(xs, 1)),
    "reduce_scatter": Case(
        lambda x: names.reduce_scatter_single(x, "sum", 0, world()),
        lambda xs, r: sum(xs).chunk(len(xs))[r],
    ),
    "reduce_scatter dim 1": Case(
        lambda x: names.reduce_scatter_single(x.T, "sum", 1, world()),
        lambda xs, r: sum(xs).T.chunk(len(xs), 1)[r],
    ),
    "all_to_all": Case(
        lambda x: functional.all_to_all_single(x, None, None, world()),
        lambda xs, r: torch.cat([x.chunk(len(xs))[r] for x in xs]),
    ),
    "permute": Case(shifted, lambda xs, r: xs[r - 1]),
    "all_reduce coalesced": Case(
        lambda x: torch.cat(functional.all_reduce_coalesced([x, x[:1] * 2], "sum", world())),
        lambda xs, r: torch.cat([sum(xs), sum(xs)[:1] * 2]),
    ),
    "all_gather coalesced": Case(
        lambda x: torch.cat(names.all_gather_single_coalesced([x, x[:1] * 2], world())),
        lambda xs, r: torch.cat([*xs, *(x[:1] * 2 for x in xs)]),
    ),
    "reduce_scatter coalesced": Case(
        lambda x: torch.cat(names.reduce_scatter_single_coalesced([x, x * 2], "sum", [0, 0], world())),
        lambda xs, r: torch.cat([sum(xs).chunk(len(xs))[r], sum(xs).chunk(len(xs))[r] * 2]),
    ),
}


def run_cases(rank: int, world_size: int) -> dict[str, Tensor]:
    results = {}
    for name, case in CASES.items():
        x = data(rank)
        results[name] = case.distributed(x) + 0  # + 0 waits for the collective
        assert torch.equal(x, data(rank)), f"{name} changed its input"
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_eager(world_size: int) -> None:
    xs = [data(rank) for rank in range(world_size)]
    for rank, results in enumerate(ranks(world_size).run(run_cases)):
        for name, case in CASES.items():
            torch.testing.assert_close(results[name], case.plain(xs, rank), rtol=0, atol=0, msg=f"{name}, rank {rank}")


def reduce_over_mesh_axes(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    return functional.all_reduce(data(rank), "sum", (mesh, 0)) + 0, functional.all_reduce(
        data(rank), "sum", (mesh, 1)
    ) + 0


def test_over_one_axis_of_a_mesh() -> None:
    for rank, (rows, columns) in enumerate(ranks(4).run(reduce_over_mesh_axes)):
        row, column = divmod(rank, 2)
        assert torch.equal(rows, data(column) + data(2 + column))
        assert torch.equal(columns, data(2 * row) + data(2 * row + 1))


def chain(x: Tensor) -> Tensor:
    """Collectives of both styles between pointwise work, for the compiler."""
    y = functional.all_reduce(x * 2, "sum", world())
    z = names.reduce_scatter_single(y + 1, "sum", 0, world())
    w = names.all_gather_single(z - 3, 0, world())
    out = torch.empty_like(w)
    dist.all_reduce(w)
    dist.all_gather_into_tensor(out, w.chunk(dist.get_world_size())[0].contiguous())
    return out.tanh()


def run_compiled(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    return compiled(data(rank)), chain(data(rank))


def test_compiled_collectives() -> None:
    n = 2
    y = sum(data(rank) for rank in range(n)) * 2
    w = ((y + 1) * n - 3) * n
    expected = w.chunk(n)[0].repeat(n, 1).tanh()
    for compiled, eager in ranks(n).run(run_compiled, timeout=100):
        torch.testing.assert_close(compiled, expected)
        torch.testing.assert_close(eager, expected)


def train_compiled(rank: int, world_size: int) -> Training:
    torch._dynamo.reset()
    model = make_model()
    ddp = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        inputs, targets = my_batch(step, rank, world_size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return training(model, losses)


def test_compiled_ddp() -> None:
    assert_same_training(ranks(2).run(train_compiled, timeout=100), train_alone())
