"""Algorithms by name inside the backend, and a new one that is one function in one file: this one."""

import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import RankFailure, ranks
from unisono.algorithms import list_algorithms, names, register_algorithm, registry
from unisono.drawing import draw
from unisono.schedule import Collective, Schedule, Step, Transfer, preset
from unisono.selection import select
from unisono.simulation import simulate
from unisono.verification import verify


def brigade(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Each rank hands the whole to the next."""
    line = [(root + i) % world_size for i in range(world_size)]
    steps = [Step.of(Transfer(a, b, 0, count=chunks)) for a, b in pairwise(line)]
    return Schedule("brigade", Collective.of("broadcast", world_size, chunks, root), steps)


def add_brigade() -> None:
    register_algorithm("brigade", "broadcast", steps="n-1", nbytes_per_rank="1")(brigade)


def by_brigade(rank: int, world_size: int) -> list[float]:
    add_brigade()
    x = torch.full((70_001,), float(rank))
    with unisono.algorithm("brigade"):
        dist.broadcast(x, world_size - 1)
    return x[[0, -1]].tolist()


def test_a_new_algorithm_is_proved_priced_drawn_selected_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names()  # everything that belongs to the registry is in it; what is added here leaves it again
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    add_brigade()
    schedule = brigade(4, root=1)
    assert verify(schedule).ok
    assert simulate(schedule, preset("shared_memory", 4), 1 << 20).time > 0
    assert "brigade broadcast" in str(draw(schedule))
    assert "brigade" in names("broadcast")
    quotes = select("broadcast", 1 << 10, preset("shared_memory", 3)).quotes
    assert "brigade" in {quote.candidate.algorithm.name for quote in quotes}
    assert ranks(3).run(by_brigade) == [[2.0, 2.0]] * 3


def every_algorithm(rank: int, world_size: int, numel: int, deterministic: bool) -> list[str]:
    """Names of the algorithms whose all_reduce is not what the default path gives (exact integers, so any order is)."""
    mine = torch.arange(numel, dtype=torch.float32) % 97 * (rank + 1)
    expected = mine.clone()
    dist.all_reduce(expected)
    wrong = []
    for entry in list_algorithms():
        if entry.collective == "all_reduce" and not entry.simulation_only:
            x = mine.clone()
            with unisono.algorithm(entry.name, deterministic=deterministic):
                dist.all_reduce(x, async_op=True).wait()
            if not torch.equal(x, expected):
                wrong.append(entry.name)
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_all_reduce_gives_the_same(world_size: int) -> None:
    for numel, deterministic in ((3, False), (30_011, True)):
        assert ranks(world_size).run(every_algorithm, numel, deterministic) == [[]] * world_size


def uneven_reduce_scatter(rank: int, world_size: int) -> list[str]:
    """Algorithms that do not scatter sums of pieces of several sizes, one of them empty."""
    pieces, wrong = [torch.full((2 * r,), float(rank + r)) for r in range(world_size)], []
    expected = [float(sum(r + rank for r in range(world_size)))] * (2 * rank)
    for name in sorted(names("reduce_scatter")):
        if registry.algorithm_info(name, "reduce_scatter").simulation_only:
            continue
        output = torch.zeros(2 * rank)
        with unisono.algorithm(name):
            dist.reduce_scatter(output, pieces)
        if output.tolist() != expected:
            wrong.append(name)
    return wrong


def test_every_reduce_scatter_takes_pieces_of_several_sizes() -> None:
    for world_size in (2, 4):
        assert ranks(world_size).run(uneven_reduce_scatter) == [[]] * world_size


def bits_in_rank_order(rank: int, world_size: int) -> list[str]:
    """Algorithms that, told to be deterministic, do not give the default path's bits for random floats."""
    mine = torch.randn(5_003, generator=torch.Generator().manual_seed(rank))
    expected = mine.clone()
    dist.all_reduce(expected)
    wrong = []
    for name in ("ring", "double_tree", "halving_doubling"):
        x = mine.clone()
        with unisono.algorithm(name, deterministic=True):
            dist.all_reduce(x)
        if not torch.equal(x, expected):
            wrong.append(name)
    return wrong


def test_deterministic_means_the_same_bits() -> None:
    assert ranks(5).run(bits_in_rank_order) == [[]] * 5


def choices(rank: int, world_size: int) -> list[str]:
    """What the guard says when only this rank's choice differs: for a block, a group, the environment."""
    said = []
    group = dist.new_group(pg_options=unisono.Options(algorithm={"all_reduce": "ring"}))
    if rank == 0:
        os.environ["UNISONO_ALGORITHM"] = "double_tree"
    from_environment = dist.new_group()
    os.environ.pop("UNISONO_ALGORITHM", None)
    for target, name in ((dist.group.WORLD, "star"), (group, "ring"), (from_environment, "double_tree")):
        try:
            if target is dist.group.WORLD and rank == 0:
                with unisono.algorithm(name):
                    dist.all_reduce(torch.ones(2), group=target)
            elif target is group and rank == 1:
                with unisono.algorithm(None):
                    dist.all_reduce(torch.ones(2), group=target)
            else:
                dist.all_reduce(torch.ones(2), group=target)
        except unisono.MismatchError as error:
            said.append(str(error))
        dist.barrier()
    dist.destroy_process_group(group)
    dist.destroy_process_group(from_environment)
    return said


def test_a_choice_counts_and_is_compared() -> None:
    for said in ranks(2).run(choices):
        assert len(said) == 3
        for words, name in zip(said, ("star", "ring", "double_tree"), strict=True):
            assert f"by {name})" in words


def misfit(rank: int, world_size: int, name: str) -> None:
    with unisono.algorithm(name):
        dist.all_to_all_single(torch.empty(world_size), torch.ones(world_size))


def test_an_algorithm_that_does_not_fit_says_so_by_name() -> None:
    with pytest.raises(RankFailure, match="double_tree has no all_to_all"):
        ranks(2).run(misfit, "double_tree")
    with pytest.raises(unisono.UsageError, match="unknown algorithm 'doubletree'"), unisono.algorithm("doubletree"):
        pass


def changed_in_a_block(rank: int, world_size: int) -> None:
    """What serves a group by express is renewed, once the group is warm, within whatever call comes then."""
    group = dist.group.WORLD._get_backend(torch.device("cpu"))._group
    for name in ("double_tree", "ring") if rank else ():  # ring has no barrier
        with unisono.algorithm(name):
            group.collectives.preparer.notify()
    dist.barrier()


def test_a_block_leaves_nothing_behind() -> None:
    ranks(2).run(changed_in_a_block)
