"""Pipelined chain: each rank hands on to the next, piece by piece.

With k pieces over 4 ranks (root 0), step t sends piece t-i from the i-th rank to the one after it:

    step 0: 0>1 c0 =
    step 1: 0>1 c1 =, 1>2 c0 =
    step 2: 1>2 c1 =, 2>3 c0 =
    step 3: 2>3 c1 =

n-2+k steps: every port is busy all the time, so large messages take little more than their bytes.
"""

import numpy as np

from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, LazySteps, Schedule, Step

__all__ = ["all_reduce", "broadcast", "gather", "reduce", "scatter"]


@register_algorithm("chain", "broadcast", steps="n-2+k", nbytes_per_rank="1")
def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Pieces run down the chain, one behind the other."""

    def make(t: int) -> Step:
        i = np.arange(max(0, t - chunks + 1), min(t + 1, world_size - 1))
        return Step.make((root + i) % world_size, (root + i + 1) % world_size, t - i)

    steps = LazySteps(world_size - 2 + chunks if world_size > 1 else 0, make)
    return Schedule("chain", Collective.of("broadcast", world_size, chunks, root), steps)


@register_algorithm("chain", "scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def scatter(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Blocks run down the chain, the one with the longest way first."""

    def make(t: int) -> Step:
        i = np.arange(t + 1)
        block = (root + world_size - 1 - t + i) % world_size
        return Step.make((root + i) % world_size, (root + i + 1) % world_size, block * chunks, chunks)

    steps = LazySteps(world_size - 1, make)
    return Schedule("chain", Collective.of("scatter", world_size, chunks, root), steps)


@register_algorithm("chain", "reduce", steps="n-2+k", nbytes_per_rank="1")
def reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The broadcast backwards: sums grow on the way to the root."""
    return broadcast(world_size, root, chunks).reversed()


@register_algorithm("chain", "gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def gather(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The scatter backwards: blocks run up the chain to the root."""
    return scatter(world_size, root, chunks).reversed()


@register_algorithm("chain", "all_reduce", steps="2*(n-2+k)", nbytes_per_rank="1 + (n>2)")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Sums run up to rank 0, results run back down."""
    return reduce(world_size, 0, chunks).then(broadcast(world_size, 0, chunks))
