"""In-network: the switch sums and multicasts, as SHARP and NVLS do. For simulation: no transport here is a switch.

The switch is id n, beyond the ranks. With k pieces, piece t goes up in step t while the sum of piece t-1 comes down.
Each rank sends its bytes once, where any algorithm without help from the network sends them nearly twice.
Source: Graham et al., "Scalable Hierarchical Aggregation Protocol (SHArP)", 2016.
"""

import numpy as np

from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


def _through_switch(
    collective: Collective, up: list[tuple[np.ndarray, int, int]], down: list[tuple[np.ndarray, int, int]]
) -> Schedule:
    """Waves of (ranks, chunk, count) up, each followed a step later by its wave down."""
    switch = collective.world_size
    steps = []
    for t in range(len(up) + 1 if collective.world_size > 1 else 0):
        parts = [Step.make(r, switch, c, k, collective.reduces) for r, c, k in up[t : t + 1]]
        parts += [Step.make(switch, r, c, k) for r, c, k in down[max(t - 1, 0) : t]]
        steps.append(Step.together(*parts))
    return Schedule("in_network", collective, tuple(steps), switches=1)


def _waves(ranks: np.ndarray, chunks: int) -> list[tuple[np.ndarray, int, int]]:
    return [(ranks, t, 1) for t in range(chunks)]


@register_algorithm("in_network", "all_reduce", steps="k+1", nbytes_per_rank="1", simulation_only=True)
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Up to the switch, which sums; down to every rank."""
    waves = _waves(np.arange(world_size), chunks)
    return _through_switch(Collective.of("all_reduce", world_size, chunks), waves, waves)


@register_algorithm("in_network", "reduce", steps="k+1", nbytes_per_rank="1", simulation_only=True)
def reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Up to the switch, which sums; down to the root."""
    up, down = _waves(np.arange(world_size), chunks), _waves(np.array([root]), chunks)
    return _through_switch(Collective.of("reduce", world_size, chunks, root), up, down)


@register_algorithm("in_network", "broadcast", steps="k+1", nbytes_per_rank="1", simulation_only=True)
def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """Up from the root, down to every rank else."""
    up, down = _waves(np.array([root]), chunks), _waves(np.delete(np.arange(world_size), root), chunks)
    return _through_switch(Collective.of("broadcast", world_size, chunks, root), up, down)


@register_algorithm("in_network", "reduce_scatter", steps="n+1", nbytes_per_rank="1", simulation_only=True)
def reduce_scatter(world_size: int, chunks: int = 1) -> Schedule:
    """Block after block up to the switch, each sum down to its owner."""
    up = [(np.arange(world_size), b * chunks, chunks) for b in range(world_size)]
    down = [(np.array([b]), b * chunks, chunks) for b in range(world_size)]
    return _through_switch(Collective.of("reduce_scatter", world_size, chunks), up, down)


@register_algorithm("in_network", "all_gather", steps="2", nbytes_per_rank="1/n", simulation_only=True)
def all_gather(world_size: int, chunks: int = 1) -> Schedule:
    """Every rank's block up to the switch at once, all others down to every rank."""
    ranks = np.arange(world_size)
    others = [np.delete(ranks, r) for r in ranks]
    up = Step.make(ranks, world_size, ranks * chunks, chunks)
    blocks = np.repeat(ranks, world_size - 1) * chunks
    down = Step.make(world_size, np.concatenate(others), blocks, chunks)
    steps = (up, down) if world_size > 1 else ()
    return Schedule("in_network", Collective.of("all_gather", world_size, chunks), steps, switches=1)
