"""Recursive doubling: exchange with the rank at distance 1, 2, 4 ...; what a rank knows doubles each time.

For 4 ranks:

    step 0: 0>1 c0 +, 1>0 c0 +, 2>3 c0 +, 3>2 c0 +
    step 1: 0>2 c0 +, 1>3 c0 +, 2>0 c0 +, 3>1 c0 +

log2 n steps, the least possible. Ranks beyond a power of two are folded into a neighbour first and served last.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

import numpy as np

from unisono.algorithms.blocks import Core, circular
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce"]


@register_algorithm("recursive_doubling", "all_reduce", steps="L + (x>0)", nbytes_per_rank="L")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Partners swap their whole sums at distance 1, 2, 4 ..."""
    core, member = Core(world_size), np.arange(Core(world_size).size)
    rank, (even, odd) = core.members, core.pairs
    steps = [Step.make(rank, rank[member ^ d], 0, chunks, True) for d in core.distances]
    if core.extra:
        steps = [Step.make(even, odd, 0, chunks, True), *steps, Step.make(odd, even, 0, chunks)]
    return Schedule("recursive_doubling", Collective.of("all_reduce", world_size, chunks), tuple(steps))


@register_algorithm(
    "recursive_doubling",
    "all_gather",
    steps="L + (x>0)",
    nbytes_per_rank="<= ((n-1)*(1 + (x>0)) + x*(L-2))/n",
)
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Partners swap all the blocks they have at distance 1, 2, 4 ..."""
    core, member = Core(world_size), np.arange(Core(world_size).size)
    rank, (even, odd) = core.members, core.pairs
    steps = []
    for d in core.distances:
        group = member & -d
        first = core.first(group)
        steps.append(circular(rank, rank[member ^ d], first, core.first(group + d) - first, world_size, chunks))
    if core.extra:
        fold = Step.make(even, odd, even * chunks, chunks)
        steps = [fold, *steps, circular(odd, even, even + 1, world_size - 1, world_size, chunks)]
    return Schedule("recursive_doubling", Collective.of("all_gather", world_size, chunks), tuple(steps))
