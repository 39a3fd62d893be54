"""Hierarchical: one algorithm inside each host, another between hosts.

Rank r is number r % g of host r // g, with g ranks per host and N hosts. all_reduce: reduce_scatter inside, so that
number j of every host holds block j; all_reduce of block j among all numbers j, over g networks side by side; then
all_gather inside. Where the inner algorithm has no reduce_scatter, sums go to number 0 of each host and come back from
it. The outer network carries 1/g of the bytes per rank. From one root: first to one rank of every host, of the same
number as the root, then inside the hosts. Options: hosts (by default the most nearly square grid), intra and inter.
Hosts of unequal numbers of ranks, or of ranks that are not consecutive, are for leaders and columns.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.blocks import build_level, does_not_fit
from unisono.algorithms.cut import HostsOption
from unisono.algorithms.formula import squarish
from unisono.algorithms.registry import names, register_algorithm
from unisono.errors import UsageError
from unisono.schedule import Collective, Schedule, Step, as_hosts, show_hosts
from unisono.schedule.model import chain_steps
from unisono.schedule.transform import place, refine

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]


def _grid_of_ranks(world_size: int, hosts: HostsOption, collective: str) -> NDArray[np.int64]:
    """Ranks by host and number, int64, shape (hosts, ranks per host); by default the most nearly square grid.

    Raises UsageError if the ranks do not divide among the hosts.
    """
    try:
        found = as_hosts(squarish(world_size)[0] if hosts is None else hosts, world_size)
    except UsageError as problem:
        raise does_not_fit("hierarchical", collective, str(problem)) from None
    if found != as_hosts(len(found), len(found) * len(found[0])):
        raise does_not_fit(
            "hierarchical", collective, f"hosts of {show_hosts(found)} are no grid: take leaders or columns"
        )
    return np.arange(world_size).reshape(len(found), -1)


def _every_chunk(groups: int, count: int) -> NDArray[np.int64]:
    """Chunk ids that mean the same in every group: int64, shape (groups, count)."""
    return np.broadcast_to(np.arange(count), (groups, count))


def _levels(collective: str, world_size: int, root: int, *levels: tuple[Schedule, NDArray[np.int64]]) -> Schedule:
    """Schedules that pass every chunk on, one after the other, each by the groups of ranks beside it."""
    total = lcm(*(level.collective.num_chunks for level, _ in levels))
    steps: Sequence[Step] = ()
    for level, groups in levels:
        finer = refine(level.steps, total // level.collective.num_chunks)
        steps = chain_steps(steps, place(finer, groups, _every_chunk(len(groups), total)))
    return Schedule("hierarchical", Collective.of(collective, world_size, total, root), steps)


@register_algorithm("hierarchical", "all_reduce", steps="2*(a-1) + 2*(b-1)", nbytes_per_rank="2*(n-1)/n")
def all_reduce(
    world_size: int, chunks: int = 1, hosts: HostsOption = None, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """Reduce_scatter inside, all_reduce between, all_gather inside."""
    ranks = _grid_of_ranks(world_size, hosts, "all_reduce")
    number, local = ranks.shape
    between = build_level(inter, "hierarchical", "all_reduce", number, 0, chunks)
    per_block = between.collective.num_chunks
    if intra not in names("reduce_scatter") or intra not in names("all_gather"):
        inward = build_level(intra, "hierarchical", "reduce", local, 0, per_block)
        outward = build_level(intra, "hierarchical", "broadcast", local, 0, per_block)
        return _levels("all_reduce", world_size, 0, (inward, ranks), (between, ranks[:, :1].T), (outward, ranks))
    inward = build_level(intra, "hierarchical", "reduce_scatter", local, 0, per_block)
    outward = build_level(intra, "hierarchical", "all_gather", local, 0, per_block)
    pieces = inward.collective.pieces
    everything = _every_chunk(number, local * pieces)
    blocks = np.arange(local * pieces).reshape(local, pieces)
    up = place(inward.steps, ranks, everything)
    across = place(refine(between.steps, pieces // per_block), ranks.T, blocks)
    down = place(outward.steps, ranks, everything)
    steps = chain_steps(chain_steps(up, across), down)
    return Schedule("hierarchical", Collective.of("all_reduce", world_size, local * pieces), steps)


@register_algorithm("hierarchical", "all_gather", steps="(a-1) + (b-1)", nbytes_per_rank="(n-1)/n")
def all_gather(
    world_size: int, chunks: int = 1, hosts: HostsOption = None, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """Between hosts first, where each block travels once; then inside."""
    ranks = _grid_of_ranks(world_size, hosts, "all_gather")
    number, local = ranks.shape
    between = build_level(inter, "hierarchical", "all_gather", number, 0, chunks)
    inside = build_level(intra, "hierarchical", "all_gather", local, 0, number * between.collective.pieces)
    pieces = inside.collective.pieces // number
    by_number = np.arange(world_size * pieces).reshape(number, local, pieces).transpose(1, 0, 2).reshape(local, -1)
    across = place(refine(between.steps, pieces // between.collective.pieces), ranks.T, by_number)
    within = place(inside.steps, ranks, np.broadcast_to(by_number.ravel(), (number, by_number.size)))
    return Schedule("hierarchical", Collective.of("all_gather", world_size, pieces), chain_steps(across, within))


@register_algorithm("hierarchical", "reduce_scatter", steps="(a-1) + (b-1)", nbytes_per_rank="(n-1)/n")
def reduce_scatter(
    world_size: int, chunks: int = 1, hosts: HostsOption = None, intra: str = "ring", inter: str = "ring"
) -> Schedule:
    """The all_gather backwards: inside first, then between hosts."""
    return all_gather(world_size, chunks, hosts, intra, inter).reversed()


@register_algorithm("hierarchical", "all_to_all", steps="1 + (b>1)", nbytes_per_rank="(a-1)/a + (b-1)/b")
def all_to_all(
    world_size: int, chunks: int = 1, hosts: HostsOption = None, intra: str = "direct", inter: str = "direct"
) -> Schedule:
    """Inside, blocks go to the number they are for; between hosts, each pair of ranks exchanges one large message."""
    ranks = _grid_of_ranks(world_size, hosts, "all_to_all")
    number, local = ranks.shape
    inside = build_level(intra, "hierarchical", "all_to_all", local, 0, number * chunks)
    between = build_level(inter, "hierarchical", "all_to_all", number, 0, local * chunks)
    # chunk ids by source host, source number, goal host, goal number, piece
    ids = np.arange(world_size**2 * chunks).reshape(number, local, number, local, chunks)
    within = place(inside.steps, ranks, ids.transpose(0, 1, 3, 2, 4).reshape(number, -1))
    across = place(between.steps, ranks.T, ids.transpose(3, 0, 2, 1, 4).reshape(local, -1))
    return Schedule("hierarchical", Collective.of("all_to_all", world_size, chunks), chain_steps(within, across))


@register_algorithm("hierarchical", "broadcast", steps="<= 2*L", nbytes_per_rank="<= 2*L")
def broadcast(
    world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """One rank of every host first, then the others inside."""
    ranks = _grid_of_ranks(world_size, hosts, "broadcast")
    number, local = ranks.shape
    between = build_level(inter, "hierarchical", "broadcast", number, root // local, chunks)
    inside = build_level(intra, "hierarchical", "broadcast", local, root % local, chunks)
    return _levels("broadcast", world_size, root, (between, ranks[:, root % local][None, :]), (inside, ranks))


@register_algorithm("hierarchical", "reduce", steps="<= 2*L", nbytes_per_rank="<= 2*L")
def reduce(
    world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """The broadcast backwards: sums inside first, then between hosts."""
    return broadcast(world_size, root, chunks, hosts, intra, inter).reversed()


@register_algorithm("hierarchical", "scatter", steps="<= 2*L", nbytes_per_rank="(n-1)/n")
def scatter(
    world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """Each host's blocks to one rank of it, then one block to each rank inside."""
    ranks = _grid_of_ranks(world_size, hosts, "scatter")
    number, local = ranks.shape
    between = build_level(inter, "hierarchical", "scatter", number, root // local, local * chunks)
    inside = build_level(intra, "hierarchical", "scatter", local, root % local, chunks)
    steps = chain_steps(
        place(between.steps, ranks[:, root % local][None, :], _every_chunk(1, world_size * chunks)),
        place(inside.steps, ranks, np.arange(world_size * chunks).reshape(number, -1)),
    )
    return Schedule("hierarchical", Collective.of("scatter", world_size, chunks, root), steps)


@register_algorithm("hierarchical", "gather", steps="<= 2*L", nbytes_per_rank="<= 1")
def gather(
    world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """The scatter backwards: blocks collect inside first, then between hosts."""
    return scatter(world_size, root, chunks, hosts, intra, inter).reversed()
