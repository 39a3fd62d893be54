"""Ring, one way or both ways: every rank sends to its neighbour, n-1 times around.

In step i of the reduce_scatter, rank r passes block r-1-i on, so that block r comes home to rank r with everybody's
part in it; the all_gather then carries finished blocks around. For 3 ranks:

    step 0: 0>1 c2 +, 1>2 c0 +, 2>0 c1 +
    step 1: 0>1 c1 +, 1>2 c2 +, 2>0 c0 +
    step 2: 0>1 c0 =, 1>2 c1 =, 2>0 c2 =
    step 3: 0>1 c2 =, 1>2 c0 =, 2>0 c1 =

2(n-1)/n of the bytes per rank is the least possible without help from the network; the 2(n-1) steps are its price.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import numpy as np

from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "both_ways", "lap", "reduce_scatter"]


def lap(world_size: int, stride: int, pieces: int, first: int, count: int, reduce: bool) -> tuple[Step, ...]:
    """Once around the ring r -> r + stride, for `count` pieces from `first` on in each block of `pieces`."""
    if world_size == 1:
        return ()
    ranks = np.arange(world_size)
    block = (ranks - stride * reduce) % world_size
    return (
        Step.make(
            ranks,
            (ranks + stride) % world_size,
            block * pieces + first,
            count,
            reduce,
            repeat=world_size - 1,
            shift=-stride * pieces,
            modulo=world_size * pieces,
        ),
    )


def both_ways(world_size: int, stride: int, chunks: int, reduce: bool) -> tuple[Step, ...]:
    """Two laps at once, half of each block of 2 * chunks pieces on r -> r+1, half on r -> r + stride."""
    halves = (lap(world_size, s, 2 * chunks, i * chunks, chunks, reduce) for i, s in enumerate((1, stride)))
    return tuple(Step.together(*pair) for pair in zip(*halves, strict=True))


@register_algorithm("ring", "reduce_scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Partial sums travel once around; each block ends at its owner."""
    collective = Collective.of("reduce_scatter", world_size, chunks)
    return Schedule("ring", collective, lap(world_size, 1, chunks, 0, chunks, reduce=True))


@register_algorithm("ring", "all_gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Finished blocks travel once around."""
    collective = Collective.of("all_gather", world_size, chunks)
    return Schedule("ring", collective, lap(world_size, 1, chunks, 0, chunks, reduce=False))


@register_algorithm("ring", "all_reduce", steps="2*(n-1)", nbytes_per_rank="2*(n-1)/n")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Twice around: the reduce_scatter, then the all_gather."""
    return reduce_scatter(world_size, chunks).then(all_gather(world_size, chunks))


@register_algorithm("bidirectional_ring", "reduce_scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def bidirectional_reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Half of every block goes around one way, half the other way, at the same time."""
    collective = Collective.of("reduce_scatter", world_size, 2 * chunks)
    return Schedule("bidirectional_ring", collective, both_ways(world_size, -1, chunks, reduce=True))


@register_algorithm("bidirectional_ring", "all_gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def bidirectional_all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Half of every block goes around one way, half the other way, at the same time."""
    collective = Collective.of("all_gather", world_size, 2 * chunks)
    return Schedule("bidirectional_ring", collective, both_ways(world_size, -1, chunks, reduce=False))


@register_algorithm("bidirectional_ring", "all_reduce", steps="2*(n-1)", nbytes_per_rank="2*(n-1)/n")
def bidirectional_all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Both ways at once: the reduce_scatter, then the all_gather."""
    return bidirectional_reduce_scatter(world_size, chunks).then(bidirectional_all_gather(world_size, chunks))
