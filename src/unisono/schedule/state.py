"""Symbolic propagation: which contributions every rank holds of every chunk.

A chunk's value at a rank is a multiset of contributions, one count per contributing rank. A copy replaces it, a
reduction adds to it. verify proves postconditions with it, draw shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.collectives import Collective
from unisono.schedule.model import Schedule, Step, Transfer

__all__ = ["State", "Units", "lineage", "states", "well_formed"]

_CLIP = 99  # more than once is all that matters, and a wrong schedule may double in every step


@dataclass(frozen=True)
class Units:
    """A step's well-formed transfers chunk by chunk: arrays of one length; `transfer` is the index within the step."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    chunk: NDArray[np.int64]
    reduce: NDArray[np.bool_]
    transfer: NDArray[np.int64]

    @classmethod
    def of(cls, schedule: Schedule, step: Step) -> "Units":
        """The units of a plain step, without the transfers that are not well formed."""
        count = np.where(well_formed(schedule, step), step.count, 0)
        index = np.repeat(np.arange(len(step)), count)
        within = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        chunk = step.chunk.astype(np.int64)[index] + within
        return cls(step.src.astype(np.int64)[index], step.dst.astype(np.int64)[index], chunk, step.reduce[index], index)

    def only(self, keep: NDArray[np.bool_]) -> "Units":
        """Those units for which `keep` is true."""
        return Units(self.src[keep], self.dst[keep], self.chunk[keep], self.reduce[keep], self.transfer[keep])


class State:
    """counts: int16, shape (ranks and switches, num_chunks, contributing rank)."""

    def __init__(self, collective: Collective, switches: int = 0, chunks: Sequence[int] | None = None) -> None:
        held = collective.held_before()
        self.chunks = np.arange(collective.num_chunks) if chunks is None else np.asarray(chunks)
        n = collective.world_size
        self.counts = np.zeros((n + switches, len(self.chunks), n), dtype=np.int16)
        ranks, where = np.nonzero(held[:, self.chunks])
        self.counts[ranks, where, ranks] = 1
        self._column = np.full(collective.num_chunks, -1)
        self._column[self.chunks] = np.arange(len(self.chunks))

    def apply(self, units: Units) -> None:
        """Advance by one step: all reads first, then copies, then reductions."""
        column = self._column[units.chunk]
        units, column = units.only(column >= 0), column[column >= 0]
        value = self.counts[units.src, column]
        copies, adds = ~units.reduce, units.reduce
        self.counts[units.dst[copies], column[copies]] = value[copies]
        np.add.at(self.counts, (units.dst[adds], column[adds]), value[adds])
        self.counts[units.dst, column] = np.minimum(self.counts[units.dst, column], _CLIP)

    def at(self, rank: int, chunk: int) -> NDArray[np.int16]:
        """Counts per contributor of one chunk at one rank: int16, shape (world_size,)."""
        return np.asarray(self.counts[rank, self._column[chunk]])


def well_formed(schedule: Schedule, step: Step) -> NDArray[np.bool_]:
    """Which transfers name ranks and chunks that exist, move a chunk, and do not go from a rank to itself."""
    nodes, chunks = schedule.world_size + schedule.switches, schedule.collective.num_chunks
    exist = (step.src >= 0) & (step.src < nodes) & (step.dst >= 0) & (step.dst < nodes) & (step.src != step.dst)
    return np.asarray(exist & (step.chunk >= 0) & (step.count > 0) & (step.chunk <= chunks - step.count))


def states(schedule: Schedule, chunks: Sequence[int] | None = None) -> Iterator[State]:
    """The state before, then after each explicit step (one object, advanced in place), for some chunks or all.

    Transfers that are not well formed have no effect.
    """
    state = State(schedule.collective, schedule.switches, chunks)
    yield state
    for step in schedule.explicit_steps():
        state.apply(Units.of(schedule, step))
        yield state


def lineage(steps: Sequence[Step], rank: int, chunk: int) -> dict[int, list[Transfer]]:
    """By step, the transfers that made what `rank` holds of `chunk` after `steps`: the shortest list to explain it."""
    wanted, found = {rank}, {}
    for i in range(len(steps) - 1, -1, -1):
        here = steps[i]
        mine = (here.chunk <= chunk) & (chunk < here.chunk + here.count) & np.isin(here.dst, list(wanted))
        moved = [
            Transfer(int(here.src[t]), int(here.dst[t]), chunk, 1, bool(here.reduce[t])) for t in np.flatnonzero(mine)
        ]
        if moved:
            found[i] = moved
            wanted -= {t.dst for t in moved if not t.reduce}
            wanted |= {t.src for t in moved}
    return dict(sorted(found.items()))
