"""Columns: the ranks of one number on every host form a column, and carry an equal share of what goes between hosts.

all_reduce: reduce_scatter inside, so that each rank holds its column's part of the host's sum; the columns exchange
their parts side by side; all_gather inside. For hosts of ranks 0-1 and 2-3:

    step 0: 1>0 c0 +, 0>1 c1 +, 3>2 c0 +, 2>3 c1 +
    step 1: 0>2 c0 +, 2>0 c0 +, 1>3 c1 +, 3>1 c1 +
    step 2: 0>1 c0 =, 1>0 c1 =, 2>3 c0 =, 3>2 c1 =

Every rank sends 2(n-1)/n of the bytes, and hosts exchange as few as can be. `chunks` pieces run one step apart, so that
one is under way between hosts while the next is summed inside: for large messages. Hosts with fewer ranks than the
largest own several columns per rank. Options: hosts (schedule/hosts.py; any cut, by default the most nearly square
grid) and inter, the algorithm of a column: with `one_shot`, `two_phase` and `star` sums keep the ranks' order, by runs
(algorithms/cut.py); by default one_shot between two hosts, where it carries no more bytes, else two_phase, and for more
than 256 hosts halving_doubling.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from unisono.algorithms.blocks import build_level
from unisono.algorithms.cut import Cut, HostsOption, Ints, cut_of, once
from unisono.algorithms.leaders import MANY
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step
from unisono.schedule.model import chain_steps
from unisono.schedule.transform import overlap, place

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]


def _parts(cut: Cut, per_column: int, reduce: bool, but: int = -1) -> tuple[Step, ...]:
    """Inside: to every rank the others' parts of its columns, summed; or its columns to all ``but`` one, copied."""
    src, dst = (ends[cut.inside[1] != but] for ends in cut.inside)
    first, count = cut.columns(dst if reduce else src)
    return once(Step.make(src, dst, first * per_column, count * per_column, reduce))


def _in_pieces(
    collective: str, cut: Cut, root: int, chunks: int, before: Sequence[Step], between: Schedule, after: Sequence[Step]
) -> Schedule:
    """Steps inside, a schedule in every column, and steps inside again, for so many pieces, one behind the other."""
    columns, unit = cut.owner.shape[1], cut.owner.shape[1] * between.collective.num_chunks
    across = place(between.steps, cut.owner.T, np.arange(unit).reshape(columns, -1))
    steps = chain_steps(chain_steps(before, across), after)
    if chunks > 1:
        steps = overlap(steps, cut.world_size, np.arange(chunks * unit).reshape(chunks, unit))
    return Schedule("columns", Collective.of(collective, cut.world_size, chunks * unit, root), steps)


@register_algorithm("columns", "all_reduce", steps="2*(a>1) + min(b-1,2) + k-1", nbytes_per_rank="2*(n-1)/n")
def all_reduce(world_size: int, chunks: int = 1, hosts: HostsOption = None, inter: str = "") -> Schedule:
    """Parts are summed inside, exchanged in every column, gathered inside."""
    cut = cut_of(world_size, hosts, True)
    usual = "one_shot" if len(cut.groups) == 2 else "two_phase"
    name = inter or (usual if len(cut.groups) <= MANY else "halving_doubling")
    between = build_level(name, "columns", "all_reduce", len(cut.groups), 0, 1)
    unit = between.collective.num_chunks
    return _in_pieces("all_reduce", cut, 0, chunks, _parts(cut, unit, True), between, _parts(cut, unit, False))


@register_algorithm("columns", "reduce", steps="2*(a>1) + (b>1) + k-1", nbytes_per_rank="(a-1)/a + (a>1)/a")
def reduce(world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, inter: str = "star") -> Schedule:
    """Parts are summed inside, then at the root's host, and gathered by the root."""
    cut = cut_of(world_size, hosts, True)
    between = build_level(inter, "columns", "reduce", len(cut.groups), int(cut.group[root]), 1)
    unit = between.collective.num_chunks
    return _in_pieces("reduce", cut, root, chunks, _parts(cut, unit, True), between, _at_root(cut, root, unit, False))


def _at_root(cut: Cut, root: int, per_column: int, outward: bool) -> tuple[Step, ...]:
    """Between the root and the other ranks of its host: their columns."""
    others = np.array([rank for rank in cut.groups[cut.group[root]] if rank != root], dtype=np.int64)
    first, count = cut.columns(others)
    src: ArrayLike
    dst: ArrayLike
    src, dst = (root, others) if outward else (others, root)
    return once(Step.make(src, dst, first * per_column, count * per_column))


@register_algorithm(
    "columns",
    "broadcast",
    steps="2*(a>1) + (b>1) + k-1",
    nbytes_per_rank="(b-1)/a + 2*(a-1)/a",
)
def broadcast(
    world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, inter: str = "star"
) -> Schedule:
    """A part to each rank of the root's host, from there to the other hosts, gathered inside."""
    cut = cut_of(world_size, hosts, False)
    between = build_level(inter, "columns", "broadcast", len(cut.groups), int(cut.group[root]), 1)
    unit = between.collective.num_chunks
    after = _parts(cut, unit, False, but=root)
    return _in_pieces("broadcast", cut, root, chunks, _at_root(cut, root, unit, True), between, after)


@register_algorithm("columns", "all_gather", steps="(a>1) + (b>1) + k-1", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Every block to one rank of each other host, then inside."""
    return _all_gather(cut_of(world_size, hosts, False), chunks)


def _all_gather(cut: Cut, chunks: int) -> Schedule:
    n = cut.world_size
    group, rank = (ends.ravel() for ends in np.meshgrid(np.arange(len(cut.groups)), np.arange(n), indexing="ij"))
    holder = cut.counterpart(group, rank)
    far = group != cut.group[rank]
    across = Step.make(rank[far], holder[far], rank[far])
    steps = once(across, _spread(cut, holder, rank))
    if chunks > 1:
        steps = tuple(overlap(steps, n, np.arange(n * chunks).reshape(n, chunks).T))
    return Schedule("columns", Collective.of("all_gather", n, chunks), steps)


def _spread(cut: Cut, holder: Ints, block: Ints) -> Step:
    """Inside: every holder's block to the other ranks of its group."""
    found = []
    for number in range(int(cut.sizes.max())):
        peers = np.array([ranks[min(number, len(ranks) - 1)] for ranks in cut.groups])[cut.group[holder]]
        there = (number < cut.sizes[cut.group[holder]]) & (peers != holder)
        found.append(Step.make(holder[there], peers[there], block[there]))
    return Step.together(*found)


@register_algorithm("columns", "reduce_scatter", steps="(a>1) + (b>1) + k-1", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """The all_gather backwards: sums inside first, then between hosts, where each block's owner adds them."""
    return _all_gather(cut_of(world_size, hosts, True), chunks).reversed()


@register_algorithm("columns", "all_to_all", steps="(a>1) + (b>1)", nbytes_per_rank="(a-1)/a + (b-1)/b")
def all_to_all(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Inside, blocks go to the number they are for; between hosts, each rank of a column sends one large message."""
    cut = cut_of(world_size, hosts, False)
    dst, src = np.divmod(np.arange(world_size**2), world_size)
    block = (src * world_size + dst) * chunks
    via = cut.counterpart(cut.group[src], dst)
    inside, across = via != src, (via != dst) & (cut.group[src] != cut.group[dst])
    steps = once(
        Step.make(src[inside], via[inside], block[inside], chunks),
        Step.make(via[across], dst[across], block[across], chunks),
    )
    return Schedule("columns", Collective.of("all_to_all", world_size, chunks), steps)
