"""Recursive halving and doubling: few steps and few bytes, for any number of ranks.

Halving: partners at distance p/2 .. 2, 1 each keep one half of what they hold and hand over the other, until every rank
holds its sum; doubling runs the same way back. 2 log2 p steps with the bytes of a ring. Ranks beyond a power of two are
folded into a neighbour first and served last, which adds two steps and up to the whole vector once each way.
Source: Rabenseifner, "Optimization of collective reduction operations", 2004.
"""

from dataclasses import replace

import numpy as np

from unisono.algorithms import recursive_doubling, tree
from unisono.algorithms.blocks import Core
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]

_BYTES = "<= ((n-1)*(1 + (x>0)) + x*(L-2))/n"


@register_algorithm("halving_doubling", "all_gather", steps="L + (x>0)", nbytes_per_rank=_BYTES)
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """The doubling half: partners swap all the blocks they have."""
    return replace(recursive_doubling.all_gather(world_size, chunks), name="halving_doubling")


@register_algorithm("halving_doubling", "reduce_scatter", steps="L + (x>0)", nbytes_per_rank=_BYTES)
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """The halving half: the doubling backwards."""
    return all_gather(world_size, chunks).reversed()


@register_algorithm("halving_doubling", "all_reduce", steps="2*L", nbytes_per_rank="2*(p-1)/p + (x>0)")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Halve, then double, among the largest power of two of ranks."""
    core, member = Core(world_size), np.arange(Core(world_size).size)
    rank, (even, odd), total = core.members, core.pairs, core.size * chunks
    doubling = [Step.make(rank, rank[member ^ d], (member & -d) * chunks, d * chunks) for d in core.distances]
    steps = [step.reversed(reduce=True) for step in reversed(doubling)] + doubling
    if core.extra:
        steps = [Step.make(even, odd, 0, total, True), *steps, Step.make(odd, even, 0, total)]
    return Schedule("halving_doubling", Collective.of("all_reduce", world_size, total), tuple(steps))


@register_algorithm("halving_doubling", "broadcast", steps="2*L + (x>0)", nbytes_per_rank=f"{_BYTES} + (n-1)/n")
def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Scatter down a tree, then double."""
    return tree.scatter(world_size, root, chunks).then(all_gather(world_size, chunks), name="halving_doubling")


@register_algorithm("halving_doubling", "reduce", steps="2*L + (x>0)", nbytes_per_rank=f"{_BYTES} + (n-1)/n")
def reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Halve, then gather down a tree."""
    halved = reduce_scatter(world_size, chunks)
    return halved.then(tree.gather(world_size, root, chunks), name="halving_doubling")
