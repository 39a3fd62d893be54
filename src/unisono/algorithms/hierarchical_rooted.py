"""Hierarchical, from one root: first to one rank of every host, then inside the hosts.

The rank that stands for its host has the same number as the root. Options: hosts (by default the most nearly square
grid), intra and inter, as for the other hierarchical collectives.
"""

from math import lcm

import numpy as np

from unisono.algorithms.levels import build_level, every_chunk, grid_of_ranks
from unisono.algorithms.registry import algorithm
from unisono.schedule import Collective, Schedule
from unisono.schedule.model import chain_steps
from unisono.schedule.transform import place, refine

__all__ = ["broadcast", "gather", "reduce", "scatter"]


@algorithm("hierarchical", "broadcast", steps="<= 2*L", nbytes_per_rank="<= 2*L")
def broadcast(
    world_size: int, root: int = 0, chunks: int = 1, hosts: int | None = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """One rank of every host first, then the others inside."""
    ranks = grid_of_ranks(world_size, hosts, "broadcast")
    number, local = ranks.shape
    between = build_level(inter, "broadcast", number, root // local, chunks)
    inside = build_level(intra, "broadcast", local, root % local, chunks)
    total = lcm(between.collective.num_chunks, inside.collective.num_chunks)
    across = refine(between.steps, total // between.collective.num_chunks)
    within = refine(inside.steps, total // inside.collective.num_chunks)
    steps = chain_steps(
        place(across, ranks[:, root % local][None, :], every_chunk(1, total)),
        place(within, ranks, every_chunk(number, total)),
    )
    return Schedule("hierarchical", Collective.of("broadcast", world_size, total, root), steps)


@algorithm("hierarchical", "reduce", steps="<= 2*L", nbytes_per_rank="<= 2*L")
def reduce(
    world_size: int, root: int = 0, chunks: int = 1, hosts: int | None = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """The broadcast backwards: sums inside first, then between hosts."""
    return broadcast(world_size, root, chunks, hosts, intra, inter).reversed()


@algorithm("hierarchical", "scatter", steps="<= 2*L", nbytes_per_rank="(n-1)/n")
def scatter(
    world_size: int, root: int = 0, chunks: int = 1, hosts: int | None = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """Each host's blocks to one rank of it, then one block to each rank inside."""
    ranks = grid_of_ranks(world_size, hosts, "scatter")
    number, local = ranks.shape
    between = build_level(inter, "scatter", number, root // local, local * chunks)
    inside = build_level(intra, "scatter", local, root % local, chunks)
    steps = chain_steps(
        place(between.steps, ranks[:, root % local][None, :], every_chunk(1, world_size * chunks)),
        place(inside.steps, ranks, np.arange(world_size * chunks).reshape(number, -1)),
    )
    return Schedule("hierarchical", Collective.of("scatter", world_size, chunks, root), steps)


@algorithm("hierarchical", "gather", steps="<= 2*L", nbytes_per_rank="<= 1")
def gather(
    world_size: int, root: int = 0, chunks: int = 1, hosts: int | None = None, intra: str = "tree", inter: str = "tree"
) -> Schedule:
    """The scatter backwards: blocks collect inside first, then between hosts."""
    return scatter(world_size, root, chunks, hosts, intra, inter).reversed()
