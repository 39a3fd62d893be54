"""What a call costs over shared memory: a fixed part, its meetings, and the bytes that the busiest rank moves.

    seconds = call + meetings * meeting + moved * copy

A sum of p parts moves p - 1 times its bytes, and once for every place it is written to. Where a host has fewer cores
than ranks, the ranks move by turns. Calls that move more than 2 MiB find little of it in caches, and have a cost per
byte of their own, `cold`. The costs are fitted to a few measured calls, and tell those of all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from unisono.errors import UsageError
from unisono.program import Table
from unisono.schedule import Memory

__all__ = ["Effort", "effort", "fit_costs", "fit_memory"]

_CACHED = 2 << 20


@dataclass(frozen=True)
class Effort:
    """Meetings of a call, and bytes that its busiest rank moves, or the ranks of the host by turns."""

    meetings: int
    moved: float

    def seconds(self, memory: Memory) -> float:
        """What it takes."""
        return memory.call + self.meetings * memory.meeting + self.moved * (memory.cold if self.cold else memory.copy)

    @property
    def cold(self) -> bool:
        """True if caches hold little of what is moved."""
        return self.moved > _CACHED


def effort(tables: Sequence[Table], nbytes: float, cores: int) -> Effort:
    """Of a call of so many bytes (Collective.chunk_nbytes), by the tables of all ranks of a host."""
    moved = []
    for table in tables:
        rows = [row for row in table.program.rows if row.kind in ("copy", "sum")]
        times = sum(len(row.to) + max(len(row.parts) - 1, 0) * (row.kind == "sum") for row in rows)
        moved.append(times * table.program.collective.chunk_nbytes(nbytes))
    return Effort(tables[0].meetings, max(max(moved), sum(moved) / cores))


def fit_memory(measured: Sequence[tuple[Effort, float]], cores: int) -> Memory:
    """The costs that come nearest to measured seconds, relatively; none is below zero.

    Raises UsageError if fewer than three calls were measured.
    """
    if len(measured) < 3:
        raise UsageError(f"three costs are fitted to three measured calls or more, got {len(measured)}")
    seconds = [took for _, took in measured]
    work = [each for each, _ in measured]
    columns = [[1, w.meetings, 0 if w.cold else w.moved, w.moved if w.cold else 0] for w in work]
    call, meeting, copy, cold = fit_costs(columns, seconds)
    return Memory(call, meeting, copy or cold, cores, cold or copy)


def fit_costs(amounts: ArrayLike, seconds: ArrayLike) -> list[float]:
    """What a unit of each amount costs, from rows of amounts and their seconds: nearest relatively, none below zero."""
    columns = np.asarray(amounts, dtype=np.float64) / np.asarray(seconds)[:, None]
    scale = np.maximum(columns.max(axis=0), np.finfo(np.float64).tiny)
    found, kept = np.zeros(columns.shape[1]), [i for i, column in enumerate(columns.T) if column.any()]
    while kept:  # drop the most negative one and fit the others again
        solved = np.linalg.lstsq(columns[:, kept] / scale[kept], np.ones(len(columns)), rcond=None)[0] / scale[kept]
        if solved.min() >= 0:
            found[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    return [float(cost) for cost in found]
