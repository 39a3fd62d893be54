"""Binomial tree: in each step, every rank who has it hands it to one more.

Counting ranks from the root, at distance d = p/2 .. 2, 1 every multiple v of 2d hands to v+d what v+d and its followers
need. For 4 ranks and root 0:

    step 0: 0>2 c0 =
    step 1: 0>1 c0 =, 2>3 c0 =

ceil(log2 n) steps is the least possible; each carries the whole vector. The other direction of each is its reverse.
"""

import numpy as np

from unisono.algorithms.blocks import circular
from unisono.algorithms.formula import ceil_log2
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]

_SUBTREE = "max(n - 2**(L-1), 2**(L-2))"  # blocks in the largest subtree below the root


def _levels(world_size: int) -> list[tuple[int, np.ndarray]]:
    """(distance, senders counted from the root) of each step."""
    distances = [1 << i for i in reversed(range(ceil_log2(world_size)))]
    return [(d, np.arange(0, world_size - d, 2 * d)) for d in distances]


@register_algorithm("tree", "broadcast", steps="L", nbytes_per_rank="L")
def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Every rank who has it hands it to one more."""
    steps = tuple(
        Step.make((root + v) % world_size, (root + v + d) % world_size, 0, chunks) for d, v in _levels(world_size)
    )
    return Schedule("tree", Collective.of("broadcast", world_size, chunks, root), steps)


@register_algorithm("tree", "scatter", steps="L", nbytes_per_rank="(n-1)/n")
def scatter(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Every rank hands on half of the blocks it holds."""
    steps = []
    for d, v in _levels(world_size):
        length = np.minimum(d, world_size - v - d)
        src, dst = (root + v) % world_size, (root + v + d) % world_size
        steps.append(circular(src, dst, root + v + d, length, world_size, chunks))
    return Schedule("tree", Collective.of("scatter", world_size, chunks, root), tuple(steps))


@register_algorithm("tree", "reduce", steps="L", nbytes_per_rank="1")
def reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The broadcast backwards: sums run down to the root."""
    return broadcast(world_size, root, chunks).reversed()


@register_algorithm("tree", "gather", steps="L", nbytes_per_rank=f"{_SUBTREE}/n")
def gather(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The scatter backwards: blocks collect towards the root."""
    return scatter(world_size, root, chunks).reversed()


@register_algorithm("tree", "all_reduce", steps="2*L", nbytes_per_rank="L")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Reduce to rank 0, then broadcast."""
    return reduce(world_size, 0, chunks).then(broadcast(world_size, 0, chunks))


@register_algorithm("tree", "all_gather", steps="2*L", nbytes_per_rank="L")
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Gather at rank 0, then broadcast."""
    return gather(world_size, 0, chunks).then(broadcast(world_size, 0, world_size * chunks))


@register_algorithm("tree", "reduce_scatter", steps="2*L", nbytes_per_rank=f"1 + ({_SUBTREE} - 1)/n")
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Reduce to rank 0, then scatter."""
    return reduce(world_size, 0, world_size * chunks).then(scatter(world_size, 0, chunks))
