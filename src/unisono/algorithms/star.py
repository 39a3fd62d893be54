"""Star: all through one rank, the root or, as a parameter server, `server`.

One step in and one step out, but the bytes of every rank pass through one port.
"""

import numpy as np

from unisono.algorithms.blocks import does_not_fit
from unisono.algorithms.cut import once
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]


def _checked(server: int, world_size: int, collective: str) -> int:
    if not 0 <= server < world_size:
        raise does_not_fit("star", collective, f"there is no rank {server} among {world_size} to be the server")
    return server


@register_algorithm("star", "broadcast", steps="1", nbytes_per_rank="n-1")
def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The root sends to every rank at once."""
    step = Step.make(root, np.delete(np.arange(world_size), root), 0, chunks)
    return Schedule("star", Collective.of("broadcast", world_size, chunks, root), once(step))


@register_algorithm("star", "scatter", steps="1", nbytes_per_rank="(n-1)/n")
def scatter(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The root sends every rank its block at once."""
    peers = np.delete(np.arange(world_size), root)
    step = Step.make(root, peers, peers * chunks, chunks)
    return Schedule("star", Collective.of("scatter", world_size, chunks, root), once(step))


@register_algorithm("star", "reduce", steps="1", nbytes_per_rank="1")
def reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Every rank sends to the root, which sums in rank order."""
    return broadcast(world_size, root, chunks).reversed()


@register_algorithm("star", "gather", steps="1", nbytes_per_rank="1/n")
def gather(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Every rank sends its block to the root."""
    return scatter(world_size, root, chunks).reversed()


@register_algorithm("star", "all_reduce", steps="2", nbytes_per_rank="n-1")
def all_reduce(world_size: int, chunks: int = 1, server: int = 0) -> Schedule:
    """A parameter server: it sums what every rank sends, and sends back."""
    server = _checked(server, world_size, "all_reduce")
    return reduce(world_size, server, chunks).then(broadcast(world_size, server, chunks))


@register_algorithm("star", "reduce_scatter", steps="2", nbytes_per_rank="1")
def reduce_scatter(world_size: int, chunks: int = 1, server: int = 0) -> Schedule:
    """The server sums what every rank sends, and sends each rank its block."""
    server = _checked(server, world_size, "reduce_scatter")
    return reduce(world_size, server, world_size * chunks).then(scatter(world_size, server, chunks))


@register_algorithm("star", "all_gather", steps="2", nbytes_per_rank="n-1")
def all_gather(world_size: int, chunks: int = 1, server: int = 0) -> Schedule:
    """The server collects every rank's block, and sends all to all."""
    server = _checked(server, world_size, "all_gather")
    return gather(world_size, server, chunks).then(broadcast(world_size, server, world_size * chunks))
