"""Several tensors in one call: the coalescing manager, the coalesced functions, and the functional collectives."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from contract.test_refusals import messages
from contract.values import data
from ranks import ranks

COUNTS = (5, 0, 1000, 1, 70_001)  # of float32: empty, small, and beyond 256 KiB


def contribution(rank: int, index: int, repeat: int = 1) -> torch.Tensor:
    return data(torch.float32, COUNTS[index] * repeat, 16 * rank + index, "SUM")


def total(world_size: int, index: int, repeat: int = 1) -> torch.Tensor:
    return torch.stack([contribution(r, index, repeat) for r in range(world_size)]).double().sum(0).float()


def gathered(world_size: int, index: int) -> torch.Tensor:
    return torch.cat([contribution(r, index) for r in range(world_size)])


def shard(world_size: int, index: int, rank: int) -> torch.Tensor:
    return total(world_size, index, world_size).chunk(world_size)[rank] if COUNTS[index] else torch.empty(0)


def coalescing_manager(rank: int, world_size: int, asynchronous: bool) -> list[str]:
    everything = range(len(COUNTS))
    summed = [contribution(rank, i) for i in everything]
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for x in summed:
            dist.all_reduce(x)
    if asynchronous:
        manager.wait()
    collected = [torch.empty(COUNTS[i] * world_size) for i in everything]
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for i, x in enumerate(collected):
            dist.all_gather_into_tensor(x, contribution(rank, i))
    if asynchronous:
        manager.wait()
    shards = [torch.empty(COUNTS[i]) for i in everything]
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for i, x in enumerate(shards):
            dist.reduce_scatter_tensor(x, contribution(rank, i, world_size))
    if asynchronous:
        manager.wait()
    return [
        *differences("all_reduce", summed, lambda i: total(world_size, i)),
        *differences("all_gather", collected, lambda i: gathered(world_size, i)),
        *differences("reduce_scatter", shards, lambda i: shard(world_size, i, rank)),
    ]


def coalesced_functions(rank: int, world_size: int, asynchronous: bool) -> list[str]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch deprecates them, programs still call them
    everything = range(len(COUNTS))
    summed = [contribution(rank, i) for i in everything]
    future = dist.all_reduce_coalesced(summed, async_op=asynchronous)
    if asynchronous:
        future.wait()
    lists = [[torch.empty(COUNTS[i]) for i in everything] for _ in range(world_size)]
    future = dist.all_gather_coalesced(lists, [contribution(rank, i) for i in everything], async_op=asynchronous)
    if asynchronous:
        future.wait()
    return [
        *differences("all_reduce", summed, lambda i: total(world_size, i)),
        *differences(
            "all_gather", [torch.cat(parts) for parts in zip(*lists, strict=True)], lambda i: gathered(world_size, i)
        ),
    ]


def functional(rank: int, world_size: int) -> list[str]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch 2.13 deprecates, 2.11 has no others
    everything = range(len(COUNTS))
    mine = [contribution(rank, i) for i in everything]
    wide = [contribution(rank, i, world_size) for i in everything]
    group = dist.group.WORLD
    return [
        *differences("all_reduce", [funcol.all_reduce(x, "sum", group) for x in mine], lambda i: total(world_size, i)),
        *differences(
            "all_reduce_coalesced", funcol.all_reduce_coalesced(mine, "sum", group), lambda i: total(world_size, i)
        ),
        *differences(
            "all_gather", [funcol.all_gather_tensor(x, 0, group) for x in mine], lambda i: gathered(world_size, i)
        ),
        *differences(
            "all_gather_coalesced",
            funcol.all_gather_into_tensor_coalesced(mine, group),
            lambda i: gathered(world_size, i),
        ),
        *differences(
            "reduce_scatter",
            [funcol.reduce_scatter_tensor(x, "sum", 0, group) for x in wide],
            lambda i: shard(world_size, i, rank),
        ),
        *differences(
            "reduce_scatter_coalesced",
            funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0] * len(wide), group),
            lambda i: shard(world_size, i, rank),
        ),
        *differences("broadcast", [funcol.broadcast(x, 0, group) for x in mine], lambda i: contribution(0, i)),
        *differences(
            "all_to_all_single",
            [funcol.all_to_all_single(x, None, None, group) for x in wide],
            lambda i: (
                torch.cat([contribution(r, i, world_size).view(world_size, -1)[rank] for r in range(world_size)])
                if COUNTS[i]
                else torch.empty(0)
            ),
        ),
        *differences("unchanged", mine, lambda i: contribution(rank, i)),
    ]


def functional_uneven(rank: int, world_size: int) -> list[float]:
    """Rank r sends r + c elements to rank c."""
    splits = [rank + c for c in range(world_size)]
    x = torch.full((sum(splits),), float(rank))
    return funcol.all_to_all_single(x, splits, splits, dist.group.WORLD).tolist()


def of_several_dtypes(rank: int, world_size: int) -> list[torch.Tensor]:
    """Scatter sums of two dtypes, in turn, in one call."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    inputs = [torch.arange(2 * world_size, dtype=dtype) + rank for dtype in (torch.float32, torch.int64, torch.float32)]
    outputs = [torch.zeros(2, dtype=x.dtype) for x in inputs]
    with dist._coalescing_manager():
        for output, x in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, x)
    return outputs


def rows_that_do_not_fit(rank: int, world_size: int) -> dict[str, str]:
    """Rank 0's outputs do not fit what the ranks give; a missing rank's part, or a cast, would go unseen."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    given = [torch.ones(3), torch.ones(2)]

    def rows(count: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
        return [[torch.zeros(shape, dtype=dtype) for shape in shapes] for _ in range(count)]

    right = rows(world_size, (3,), (2,))
    wrong = {
        "few ranks": rows(world_size - 1, (3,), (2,)),
        "many ranks": rows(world_size + 1, (3,), (2,)),
        "short row": rows(world_size, (3,)),
        "wider": rows(world_size, (4, 3), (2,)),
        "shorter": rows(world_size, (1,), (2,)),
        "dtype": rows(world_size, (3,), (2,), dtype=torch.int64),
        "one twice": [right[0]] * world_size,
    }
    return messages(
        {name: partial(dist.all_gather_coalesced, wrong[name] if rank == 0 else right, given) for name in wrong}
    )


def differences(name: str, got: list[torch.Tensor], wanted: Callable[[int], torch.Tensor]) -> list[str]:
    return [f"{name} {i}: {x[:6]}" for i, x in enumerate(got) if not torch.equal(torch.as_tensor(x), wanted(i))]


def test_coalescing_manager(world_size: int) -> None:
    assert ranks(world_size).run(coalescing_manager, False) == [[]] * world_size


def test_coalescing_manager_asynchronous(world_size: int) -> None:
    assert ranks(world_size).run(coalescing_manager, True) == [[]] * world_size


def test_coalesced_functions(world_size: int) -> None:
    assert ranks(world_size).run(coalesced_functions, False) == [[]] * world_size


def test_coalesced_functions_asynchronous(world_size: int) -> None:
    assert ranks(world_size).run(coalesced_functions, True) == [[]] * world_size


def test_functional(world_size: int) -> None:
    assert ranks(world_size).run(functional) == [[]] * world_size


def test_functional_uneven_all_to_all(world_size: int) -> None:
    expected = [[float(r) for r in range(world_size) for _ in range(r + c)] for c in range(world_size)]
    assert ranks(world_size).run(functional_uneven) == expected


def test_reduce_scatter_of_several_dtypes() -> None:
    for rank, seen in enumerate(ranks(3).run(of_several_dtypes)):
        wanted = [3.0 * (2 * rank + i) + 3 for i in range(2)]
        assert [x.tolist() for x in seen] == [wanted] * 3
        assert [x.dtype for x in seen] == [torch.float32, torch.int64, torch.float32]


def test_outputs_that_do_not_fit_are_refused_on_all_ranks() -> None:
    first, second = ranks(2, group_timeout=10).run(rows_that_do_not_fit)
    for name, text in first.items():
        assert text.startswith("UsageError"), f"{name}: {text}"
        assert second[name].startswith(("UsageError", "MismatchError")), f"{name}: {second[name]}"
