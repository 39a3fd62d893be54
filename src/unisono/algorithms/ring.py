"""Ring, one way, both ways or over two strides: every rank sends to its neighbour, n-1 times around.

In step i of the reduce_scatter, rank r passes block r-1-i on, so that block r comes home to rank r with every rank's
part in it; the all_gather then carries finished blocks around. For 3 ranks:

    step 0: 0>1 c2 +, 1>2 c0 +, 2>0 c1 +
    step 1: 0>1 c1 +, 1>2 c2 +, 2>0 c0 +
    step 2: 0>1 c0 =, 1>2 c1 =, 2>0 c2 =
    step 3: 0>1 c2 =, 1>2 c0 =, 2>0 c1 =

2(n-1)/n of the bytes per rank is the least possible without help from the network; the 2(n-1) steps are its price.

A double ring is two rings through the same ranks over different links, half of the bytes on each: the first goes
r -> r+1, the second r -> r+s, where s is the smallest stride from 2 on that visits every rank and is not the first ring
backwards. For 2, 3, 4 and 6 ranks there is none, and the second ring is the first backwards. On wires between pairs,
the two rings share no wire.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from math import gcd

import numpy as np

from unisono.algorithms.blocks import does_not_fit
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "double_all_gather", "double_reduce_scatter", "reduce_scatter"]


def _lap(world_size: int, stride: int, pieces: int, first: int, count: int, reduce: bool) -> tuple[Step, ...]:
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


def _both_ways(name: str, does: str, world_size: int, stride: int, chunks: int) -> Schedule:
    """Two laps at once, half of each block of 2 * chunks pieces on r -> r+1, half on r -> r + stride."""
    reduce = does == "reduce_scatter"
    halves = (_lap(world_size, s, 2 * chunks, i * chunks, chunks, reduce) for i, s in enumerate((1, stride)))
    steps = tuple(Step.together(*pair) for pair in zip(*halves, strict=True))
    return Schedule(name, Collective.of(does, world_size, 2 * chunks), steps)


@register_algorithm("ring", "reduce_scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Partial sums travel once around; each block ends at its owner."""
    collective = Collective.of("reduce_scatter", world_size, chunks)
    return Schedule("ring", collective, _lap(world_size, 1, chunks, 0, chunks, reduce=True))


@register_algorithm("ring", "all_gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Finished blocks travel once around."""
    collective = Collective.of("all_gather", world_size, chunks)
    return Schedule("ring", collective, _lap(world_size, 1, chunks, 0, chunks, reduce=False))


@register_algorithm("ring", "all_reduce", steps="2*(n-1)", nbytes_per_rank="2*(n-1)/n")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Twice around: the reduce_scatter, then the all_gather."""
    return reduce_scatter(world_size, chunks).then(all_gather(world_size, chunks))


@register_algorithm("bidirectional_ring", "reduce_scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def bidirectional_reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Half of every block goes around one way, half the other way, at the same time."""
    return _both_ways("bidirectional_ring", "reduce_scatter", world_size, -1, chunks)


@register_algorithm("bidirectional_ring", "all_gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def bidirectional_all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Half of every block goes around one way, half the other way, at the same time."""
    return _both_ways("bidirectional_ring", "all_gather", world_size, -1, chunks)


@register_algorithm("bidirectional_ring", "all_reduce", steps="2*(n-1)", nbytes_per_rank="2*(n-1)/n")
def bidirectional_all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Both ways at once: the reduce_scatter, then the all_gather."""
    return bidirectional_reduce_scatter(world_size, chunks).then(bidirectional_all_gather(world_size, chunks))


def _stride(world_size: int, stride: int | None, collective: str) -> int:
    if stride is None:
        return next((s for s in range(2, world_size - 1) if gcd(s, world_size) == 1), -1)
    if gcd(stride, world_size) != 1:
        raise does_not_fit(
            "double_ring", collective, f"a stride of {stride} does not visit all {world_size} ranks (common divisor)"
        )
    return stride


@register_algorithm("double_ring", "reduce_scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def double_reduce_scatter(world_size: int, chunks: int = 1, stride: int | None = None) -> Schedule:
    """Half of every block goes around each ring."""
    second = _stride(world_size, stride, "reduce_scatter")
    return _both_ways("double_ring", "reduce_scatter", world_size, second, chunks)


@register_algorithm("double_ring", "all_gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def double_all_gather(world_size: int, chunks: int = 1, stride: int | None = None) -> Schedule:
    """Half of every block goes around each ring."""
    second = _stride(world_size, stride, "all_gather")
    return _both_ways("double_ring", "all_gather", world_size, second, chunks)


@register_algorithm("double_ring", "all_reduce", steps="2*(n-1)", nbytes_per_rank="2*(n-1)/n")
def double_all_reduce(world_size: int, chunks: int = 1, stride: int | None = None) -> Schedule:
    """Two rings: the reduce_scatter, then the all_gather."""
    return double_reduce_scatter(world_size, chunks, stride).then(double_all_gather(world_size, chunks, stride))
