"""Hierarchical: one algorithm inside each host, another between hosts.

Rank r is number r % g of host r // g, with g ranks per host and N hosts. all_reduce: reduce_scatter inside, so that
number j of every host holds block j; all_reduce of block j among all numbers j, over g networks side by side;
all_gather inside. Where the inner algorithm has no reduce_scatter, sums go to number 0 of each host and come back from
it. The outer network carries 1/g of the bytes per rank. Options: hosts (by default the most nearly square grid), intra,
inter.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.blocks import does_not_fit
from unisono.algorithms.formula import squarish
from unisono.algorithms.registry import algorithm, build, entry, names
from unisono.schedule import Collective, Schedule, Step
from unisono.schedule.model import chain_steps
from unisono.schedule.transform import flatten, place, refine

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


def grid_of_ranks(world_size: int, hosts: int | None, collective: str) -> NDArray[np.int64]:
    """Ranks by host and number, int64, shape (hosts, ranks per host)."""
    rows = squarish(world_size)[0] if hosts is None else hosts
    if rows < 1 or world_size % rows:
        raise does_not_fit("hierarchical", collective, f"{world_size} ranks do not divide among {rows} hosts")
    return np.arange(world_size).reshape(rows, -1)


def _build(name: str, collective: str, world_size: int, root: int, chunks: int) -> Schedule:
    if entry(name, collective).simulation_only:
        raise does_not_fit("hierarchical", collective, f"{name} needs a switch of its own at every level")
    return build(name, collective, world_size, root, chunks)


def _all_chunks(groups: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(count), (groups, count))


@algorithm("hierarchical", "all_reduce", steps="2*(a-1) + 2*(b-1)", nbytes_per_rank="2*(n-1)/n")
def all_reduce(
    world_size: int, chunks: int = 1, hosts: int | None = None, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """Reduce_scatter inside, all_reduce between, all_gather inside."""
    ranks = grid_of_ranks(world_size, hosts, "all_reduce")
    number, local = ranks.shape
    between = _build(inter, "all_reduce", number, 0, chunks)
    if {intra} - set(names("reduce_scatter")) or {intra} - set(names("all_gather")):
        return _through_leaders(ranks, between, intra)
    per_block = between.collective.num_chunks
    inward = _build(intra, "reduce_scatter", local, 0, per_block)
    outward = _build(intra, "all_gather", local, 0, per_block)
    pieces = inward.collective.pieces
    blocks = np.arange(local * pieces).reshape(local, pieces)
    steps = chain_steps(
        chain_steps(
            place(inward.steps, ranks, _all_chunks(number, local * pieces)),
            place(refine(between.steps, pieces // per_block), ranks.T, blocks),
        ),
        place(outward.steps, ranks, _all_chunks(number, local * pieces)),
    )
    return Schedule("hierarchical", Collective.of("all_reduce", world_size, local * pieces), steps)


def _through_leaders(ranks: NDArray[np.int64], between: Schedule, intra: str) -> Schedule:
    number, local = ranks.shape
    inward = _build(intra, "reduce", local, 0, between.collective.num_chunks)
    outward = _build(intra, "broadcast", local, 0, between.collective.num_chunks)
    parts = (inward, between, outward)
    total = lcm(*(s.collective.num_chunks for s in parts))
    up, across, down = (refine(s.steps, total // s.collective.num_chunks) for s in parts)
    steps = chain_steps(
        chain_steps(
            place(up, ranks, _all_chunks(number, total)),
            place(across, ranks[:, :1].T, _all_chunks(1, total)),
        ),
        place(down, ranks, _all_chunks(number, total)),
    )
    return Schedule("hierarchical", Collective.of("all_reduce", ranks.size, total), steps)


@algorithm("hierarchical", "all_gather", steps="(a-1) + (b-1)", nbytes_per_rank="(n-1)/n")
def all_gather(
    world_size: int, chunks: int = 1, hosts: int | None = None, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """Between hosts first, where each block travels once; then inside."""
    ranks = grid_of_ranks(world_size, hosts, "all_gather")
    number, local = ranks.shape
    across = _build(inter, "all_gather", number, 0, chunks)
    inside = _build(intra, "all_gather", local, 0, number * across.collective.pieces)
    pieces = inside.collective.pieces // number
    blocks = np.arange(world_size * pieces).reshape(number, local, pieces)
    by_number = blocks.transpose(1, 0, 2).reshape(local, -1)
    steps = chain_steps(
        place(refine(across.steps, pieces // across.collective.pieces), ranks.T, by_number),
        place(inside.steps, ranks, np.broadcast_to(by_number.ravel(), (number, world_size * pieces))),
    )
    return Schedule("hierarchical", Collective.of("all_gather", world_size, pieces), steps)


@algorithm("hierarchical", "reduce_scatter", steps="(a-1) + (b-1)", nbytes_per_rank="(n-1)/n")
def reduce_scatter(
    world_size: int, chunks: int = 1, hosts: int | None = None, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """The all_gather backwards: inside first, then between hosts."""
    return all_gather(world_size, chunks, hosts, intra, inter).reversed()


@algorithm("hierarchical", "broadcast", steps="<= 2*L", nbytes_per_rank="<= 2*L")
def broadcast(
    world_size: int,
    root: int = 0,
    chunks: int = 1,
    hosts: int | None = None,
    intra: str = "tree",
    inter: str = "tree",
) -> Schedule:
    """One rank of every host first, then the others inside."""
    ranks = grid_of_ranks(world_size, hosts, "broadcast")
    number, local = ranks.shape
    across = _build(inter, "broadcast", number, root // local, chunks)
    inside = _build(intra, "broadcast", local, root % local, chunks)
    total = lcm(across.collective.num_chunks, inside.collective.num_chunks)

    def refined(part: Schedule) -> Sequence[Step]:
        return flatten(refine(part.steps, total // part.collective.num_chunks))

    steps = chain_steps(
        place(refined(across), ranks[:, root % local][None, :], _all_chunks(1, total)),
        place(refined(inside), ranks, _all_chunks(number, total)),
    )
    return Schedule("hierarchical", Collective.of("broadcast", world_size, total, root), steps)


@algorithm("hierarchical", "reduce", steps="<= 2*L", nbytes_per_rank="<= 2*L")
def reduce(
    world_size: int,
    root: int = 0,
    chunks: int = 1,
    hosts: int | None = None,
    intra: str = "tree",
    inter: str = "tree",
) -> Schedule:
    """The broadcast backwards: inside first, then between hosts."""
    return broadcast(world_size, root, chunks, hosts, intra, inter).reversed()
