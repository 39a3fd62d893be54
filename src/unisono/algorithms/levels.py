"""What the hierarchical families share: ranks by host and number, and a schedule for one level."""

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.blocks import does_not_fit
from unisono.algorithms.formula import squarish
from unisono.algorithms.registry import build, entry
from unisono.schedule import Schedule

__all__ = ["build_level", "every_chunk", "grid_of_ranks"]


def grid_of_ranks(world_size: int, hosts: int | None, collective: str) -> NDArray[np.int64]:
    """Ranks by host and number, int64, shape (hosts, ranks per host); by default the most nearly square grid.

    Raises UsageError if the ranks do not divide among the hosts.
    """
    rows = squarish(world_size)[0] if hosts is None else hosts
    if rows < 1 or world_size % rows:
        raise does_not_fit("hierarchical", collective, f"{world_size} ranks do not divide among {rows} hosts")
    return np.arange(world_size).reshape(rows, -1)


def build_level(name: str, collective: str, world_size: int, root: int, chunks: int) -> Schedule:
    """The schedule of one level. Raises UsageError if there is no such algorithm, or it needs a switch."""
    if entry(name, collective).simulation_only:
        raise does_not_fit("hierarchical", collective, f"{name} needs a switch of its own at every level")
    return build(name, collective, world_size, root, chunks)


def every_chunk(groups: int, count: int) -> NDArray[np.int64]:
    """Chunk ids that mean the same in every group: int64, shape (groups, count)."""
    return np.broadcast_to(np.arange(count), (groups, count))
