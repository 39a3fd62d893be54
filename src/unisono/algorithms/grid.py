"""Grid (2D ring): rings along the rows, then along the columns, of a grid of ranks.

Of a x b ranks, a in a row: all_reduce is reduce_scatter in the rows, all_reduce in the columns on 1/a of the bytes, and
all_gather in the rows. The bytes of one ring, but 2(a-1) + 2(b-1) steps instead of 2(ab-1). With a prime number of
ranks there is one row, and the grid is a ring.
Source: Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018 (2D-torus all-reduce).
"""

from dataclasses import replace

import numpy as np

from unisono.algorithms import hierarchical, ring
from unisono.algorithms.blocks import does_not_fit
from unisono.algorithms.formula import squarish
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule
from unisono.schedule.model import chain_steps
from unisono.schedule.transform import place

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def _rows(world_size: int, rows: int | None, collective: str) -> int:
    if rows is None:
        return squarish(world_size)[0]
    if rows < 1 or world_size % rows:
        raise does_not_fit("grid", collective, f"{world_size} ranks do not make {rows} rows")
    return rows


@register_algorithm("grid", "all_reduce", steps="2*(a-1) + 2*(b-1)", nbytes_per_rank="2*(n-1)/n")
def all_reduce(world_size: int, chunks: int = 1, rows: int | None = None) -> Schedule:
    """Reduce_scatter in rows, all_reduce in columns, all_gather in rows."""
    rows = _rows(world_size, rows, "all_reduce")
    return replace(hierarchical.all_reduce(world_size, chunks, rows, "ring", "ring"), name="grid")


@register_algorithm("grid", "all_gather", steps="(a-1) + (b-1)", nbytes_per_rank="(n-1)/n")
def all_gather(world_size: int, chunks: int = 1, rows: int | None = None) -> Schedule:
    """Blocks travel along the rows, then whole rows along the columns."""
    rows = _rows(world_size, rows, "all_gather")
    ranks = np.arange(world_size).reshape(rows, -1)
    columns = world_size // rows
    by_row = np.arange(world_size * chunks).reshape(rows, -1)
    everything = np.broadcast_to(np.arange(world_size * chunks), (columns, world_size * chunks))
    steps = chain_steps(
        place(ring.all_gather(columns, chunks).steps, ranks, by_row),
        place(ring.all_gather(rows, columns * chunks).steps, ranks.T, everything),
    )
    return Schedule("grid", Collective.of("all_gather", world_size, chunks), steps)


@register_algorithm("grid", "reduce_scatter", steps="(a-1) + (b-1)", nbytes_per_rank="(n-1)/n")
def reduce_scatter(world_size: int, chunks: int = 1, rows: int | None = None) -> Schedule:
    """The all_gather backwards."""
    return all_gather(world_size, chunks, rows).reversed()
