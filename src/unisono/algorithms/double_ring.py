"""Double ring: two rings through the same ranks over different links, half of the bytes on each.

The first ring goes r -> r+1, the second r -> r+s, where s is the smallest stride from 2 on that visits every rank and
is not the first ring backwards. For 2, 3, 4 and 6 ranks there is none, and the second ring is the first backwards. On
wires between pairs, the two rings share no wire.
"""

from math import gcd

from unisono.algorithms.blocks import does_not_fit
from unisono.algorithms.registry import register_algorithm
from unisono.algorithms.ring import both_ways
from unisono.schedule import Collective, Schedule

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def _stride(world_size: int, stride: int | None, collective: str) -> int:
    if stride is None:
        return next((s for s in range(2, world_size - 1) if gcd(s, world_size) == 1), -1)
    if gcd(stride, world_size) != 1:
        raise does_not_fit(
            "double_ring", collective, f"a stride of {stride} does not visit all {world_size} ranks (common divisor)"
        )
    return stride


@register_algorithm("double_ring", "reduce_scatter", steps="n-1", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1, stride: int | None = None) -> Schedule:
    """Half of every block goes around each ring."""
    collective = Collective.of("reduce_scatter", world_size, 2 * chunks)
    steps = both_ways(world_size, _stride(world_size, stride, collective.name), chunks, reduce=True)
    return Schedule("double_ring", collective, steps)


@register_algorithm("double_ring", "all_gather", steps="n-1", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1, stride: int | None = None) -> Schedule:
    """Half of every block goes around each ring."""
    collective = Collective.of("all_gather", world_size, 2 * chunks)
    steps = both_ways(world_size, _stride(world_size, stride, collective.name), chunks, reduce=False)
    return Schedule("double_ring", collective, steps)


@register_algorithm("double_ring", "all_reduce", steps="2*(n-1)", nbytes_per_rank="2*(n-1)/n")
def all_reduce(world_size: int, chunks: int = 1, stride: int | None = None) -> Schedule:
    """Two rings: the reduce_scatter, then the all_gather."""
    return reduce_scatter(world_size, chunks, stride).then(all_gather(world_size, chunks, stride))
