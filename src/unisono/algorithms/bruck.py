"""Bruck: ceil(log2 n) steps for any number of ranks.

all_gather: at distance d = 1, 2, 4 ... every rank sends the d blocks from its own on to the rank d before it.
all_to_all: a block with o ranks to go moves by 2**i in step i if bit i of o is set. barrier: a token to the rank d
after.
Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", 1997; the barrier is Hensgen, Finkel and Manber's dissemination barrier, 1988.
"""

import numpy as np

from unisono.algorithms.blocks import circular
from unisono.algorithms.formula import ceil_log2
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter"]


@register_algorithm("bruck", "all_gather", steps="L", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Every rank's run of consecutive blocks doubles each time."""
    ranks = np.arange(world_size)
    distances = [1 << i for i in range(ceil_log2(world_size))]
    steps = tuple(
        circular(ranks, (ranks - d) % world_size, ranks, min(d, world_size - d), world_size, chunks) for d in distances
    )
    return Schedule("bruck", Collective.of("all_gather", world_size, chunks), steps)


@register_algorithm("bruck", "reduce_scatter", steps="L", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """The all_gather backwards."""
    return all_gather(world_size, chunks).reversed()


@register_algorithm("bruck", "all_reduce", steps="2*L", nbytes_per_rank="2*(n-1)/n")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """The reduce_scatter, then the all_gather: few steps and few bytes for any number of ranks."""
    return reduce_scatter(world_size, chunks).then(all_gather(world_size, chunks))


@register_algorithm("bruck", "all_to_all", steps="L", nbytes_per_rank="<= L/2")
def all_to_all(world_size: int, chunks: int = 1) -> Schedule:
    """Blocks travel by the binary digits of their distance, many in one message."""
    source, offset = np.divmod(np.arange(world_size**2), world_size)
    chunk = (source * world_size + (source + offset) % world_size) * chunks
    steps = []
    for i in range(ceil_log2(world_size)):
        moves = (offset >> i) & 1 == 1
        here = (source + (offset & ((1 << i) - 1)))[moves]
        steps.append(Step.make(here % world_size, (here + (1 << i)) % world_size, chunk[moves], chunks))
    return Schedule("bruck", Collective.of("all_to_all", world_size, chunks), tuple(steps))


@register_algorithm("bruck", "barrier", steps="L", nbytes_per_rank="0")
def barrier(world_size: int, chunks: int = 1) -> Schedule:
    """Dissemination: after step i every rank has heard of the 2**(i+1)-1 ranks before it."""
    ranks = np.arange(world_size)
    distances = [1 << i for i in range(ceil_log2(world_size))]
    steps = tuple(Step.make(ranks, (ranks + d) % world_size, 0, chunks, True) for d in distances)
    return Schedule("bruck", Collective.of("barrier", world_size, chunks), steps)
