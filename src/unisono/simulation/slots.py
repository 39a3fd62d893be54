"""The steps of a schedule in the order the clock takes them, pieces one behind the other.

With chunks = k, every chunk is cut into k pieces, and each piece runs through the steps as its own copy of the
schedule, one step behind the piece before it: slot t holds step t-j of piece j. For k = 3 and 3 steps:

    slot 0:  step 0 of piece 0
    slot 1:  step 1 of piece 0, step 0 of piece 1
    slot 2:  step 2 of piece 0, step 1 of piece 1, step 0 of piece 2
    slot 3:                     step 2 of piece 1, step 1 of piece 2
    slot 4:                                        step 2 of piece 2

Compact steps stay compact: their repeats differ in chunk ids only, which cost nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.schedule import Schedule, Step, Topology

__all__ = ["Load", "Part", "Slot", "load_of", "slots"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """One step of one piece: `offset` is its number within the compact step `compact`, `step` its number in all."""

    compact: Step
    offset: int
    step: int
    piece: int


@dataclass(frozen=True)
class Slot:
    """`repeat` slots in a row that differ in nothing but the chunk ids; `parts` are those of the first."""

    parts: tuple[Part, ...]
    repeat: int

    def at(self, i: int) -> tuple[Part, ...]:
        """The parts of the i-th slot, 0 <= i < repeat."""
        return tuple(Part(p.compact, p.offset + i, p.step + i, p.piece) for p in self.parts)


def slots(schedule: Schedule, chunks: int) -> Iterator[Slot]:
    """All slots, in order."""
    window: list[tuple[int, Step]] = []  # (first explicit step, compact step) that some piece is still in
    begin = 0
    for step in schedule.steps:
        window = [(b, s) for b, s in window if b + s.repeat > begin - chunks + 1] + [(begin, step)]
        yield from _run(window, begin, begin + step.repeat, chunks)
        begin += step.repeat
    if chunks > 1 and window:
        yield from _run(window, begin, begin + chunks - 1, chunks)


def _run(window: list[tuple[int, Step]], begin: int, end: int, chunks: int) -> Iterator[Slot]:
    """Slots begin .. end-1; from where all pieces are in one compact step, they are alike."""
    t = begin
    while t < end:
        parts = tuple(
            Part(s, t - j - b, t - j, j)
            for b, s in reversed(window)
            for j in range(max(0, t - b - s.repeat + 1), min(chunks, t - b + 1))
        )
        alike = len(parts) == chunks and all(p.compact is parts[0].compact for p in parts)
        repeat = end - t if alike else 1
        yield Slot(parts, repeat)
        t += repeat


@dataclass(frozen=True)
class Load:
    """The messages of one slot as arrays of one length, with what they cost.

    src, dst: int64. nbytes, alpha (s), work (s on a port): float64. reduce: bool. out, into: int64, the ports they
    leave by and arrive at, -1 where there is none to contend for; `shared` tells whether any port meets two of them.
    """

    src: Ints
    dst: Ints
    nbytes: Floats
    reduce: NDArray[np.bool_]
    alpha: Floats
    work: Floats
    out: Ints
    into: Ints
    shared: bool

    def __len__(self) -> int:
        return len(self.src)


def load_of(slot: Slot, schedule: Schedule, topology: Topology, nbytes: float, chunks: int) -> Load:
    """The load of a slot when the schedule moves `nbytes`, each chunk in `chunks` pieces.

    Raises UsageError for unknown ranks.
    """
    steps = [part.compact for part in slot.parts]
    src = np.concatenate([s.src for s in steps]).astype(np.int64)
    dst = np.concatenate([s.dst for s in steps]).astype(np.int64)
    nodes = schedule.world_size + schedule.switches
    if len(src) and not (min(src.min(), dst.min()) >= 0 and max(src.max(), dst.max()) < nodes):
        raise UsageError(f"{schedule.name} names ranks that do not exist: verify the schedule first")
    chunk, count = np.concatenate([s.chunk for s in steps]), np.concatenate([s.count for s in steps])
    sizes = schedule.collective.nbytes_of(chunk, count, nbytes / chunks)
    reduce = np.concatenate([s.reduce for s in steps])
    alpha, work = topology.alpha(src, dst), sizes * topology.beta(src, dst)
    out, into = topology.ports(src, dst)
    return Load(src, dst, sizes, reduce, alpha, work, out, into, _meet(out) or _meet(into))


def _meet(ports: Ints) -> bool:
    used = np.sort(ports[ports >= 0])
    return bool((used[1:] == used[:-1]).any())
