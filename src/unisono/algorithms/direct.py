"""Direct: every rank talks to every other at once.

One-shot all_reduce: every rank sends everything to every rank, and each sums all by itself. One step, n-1 times the
bytes: best for the smallest messages. Two-phase: each rank sums its own block of all, then hands it to all. Two steps
with the bytes of a ring: best wherever all pairs are joined. Sums are taken in rank order.
"""

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import star
from unisono.algorithms.cut import once
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = [
    "all_gather",
    "all_to_all",
    "one_shot_all_reduce",
    "reduce_scatter",
    "two_phase_all_reduce",
    "two_phase_reduce",
]


def _pairs(world_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All ordered pairs (src, dst) of different ranks, by dst, then src."""
    dst, src = np.divmod(np.arange(world_size**2), world_size)
    apart = src != dst
    return src[apart], dst[apart]


@register_algorithm("direct", "reduce_scatter", steps="1", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Every rank sends each block to its owner at once."""
    src, dst = _pairs(world_size)
    step = Step.make(src, dst, dst * chunks, chunks, True)
    return Schedule("direct", Collective.of("reduce_scatter", world_size, chunks), once(step))


@register_algorithm("direct", "all_gather", steps="1", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Every rank sends its block to every rank at once."""
    src, dst = _pairs(world_size)
    step = Step.make(src, dst, src * chunks, chunks)
    return Schedule("direct", Collective.of("all_gather", world_size, chunks), once(step))


@register_algorithm("direct", "all_to_all", steps="1", nbytes_per_rank="(n-1)/n")
def all_to_all(world_size: int, chunks: int = 1) -> Schedule:
    """All n(n-1) blocks at once."""
    src, dst = _pairs(world_size)
    step = Step.make(src, dst, (src * world_size + dst) * chunks, chunks)
    return Schedule("direct", Collective.of("all_to_all", world_size, chunks), once(step))


@register_algorithm("one_shot", "all_reduce", steps="1", nbytes_per_rank="n-1")
def one_shot_all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Every rank sends everything to every rank; each sums all."""
    src, dst = _pairs(world_size)
    step = Step.make(src, dst, 0, chunks, True)
    return Schedule("one_shot", Collective.of("all_reduce", world_size, chunks), once(step))


@register_algorithm("two_phase", "all_reduce", steps="2", nbytes_per_rank="2*(n-1)/n")
def two_phase_all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Each rank sums its own block of all, then hands it to all."""
    return reduce_scatter(world_size, chunks).then(all_gather(world_size, chunks), name="two_phase")


@register_algorithm("two_phase", "reduce", steps="2", nbytes_per_rank="1")
def two_phase_reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Each rank sums its own block of all, then hands it to the root."""
    return reduce_scatter(world_size, chunks).then(star.gather(world_size, root, chunks), name="two_phase")
