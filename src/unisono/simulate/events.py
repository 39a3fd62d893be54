"""Every transfer of a small simulated run, as arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.simulate.clock import Times
from unisono.simulate.slots import Load, Part, Slot

__all__ = ["EVENT_LIMIT", "EventLog", "Events"]

EVENT_LIMIT = 1 << 18

_KINDS = (*(np.int64,) * 6, *(np.float64,) * 3, np.bool_)
_NOTHING: list[NDArray[Any]] = [np.zeros(0, dtype=kind) for kind in _KINDS]


@dataclass(frozen=True)
class Events:
    """Every transfer as arrays of one length, in the order of the steps.

    step, piece, src, dst, chunk, count: int64 (chunks chunk .. chunk+count-1, of each its piece). start, end: float64,
    seconds. nbytes: float64. reduce: bool. The receiver sums after `end`, once all messages of its step are in.
    """

    step: NDArray[np.int64]
    piece: NDArray[np.int64]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    chunk: NDArray[np.int64]
    count: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    reduce: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.step)


class EventLog:
    """Collects events until there are more than EVENT_LIMIT."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._room = EVENT_LIMIT

    def wants(self, messages: int) -> bool:
        """Whether they still fit; from the first time they do not, nothing is collected."""
        self._room = self._room - messages if 0 <= messages <= self._room else -1
        return self._room >= 0

    def see(self, parts: tuple[Part, ...], load: Load, times: Times) -> None:
        """Keep the events of one slot."""
        if self._room < 0:
            return
        lengths = [len(part.compact) for part in parts]
        steps = np.repeat(np.array([part.step for part in parts], dtype=np.int64), lengths)
        pieces = np.repeat(np.array([part.piece for part in parts], dtype=np.int64), lengths)
        plain = [part.compact.at(part.offset) for part in parts]
        chunk = np.concatenate([s.chunk for s in plain]).astype(np.int64)
        count = np.concatenate([s.count for s in plain]).astype(np.int64)
        kept = (steps, pieces, load.src, load.dst, chunk, count, times.start, times.end, load.nbytes, load.reduce)
        self._parts.append(kept)

    def miss(self, slot: Slot, load: Load) -> None:
        """Nothing to keep."""

    def events(self) -> Events | None:
        """What was collected, None if it was too much."""
        if self._room < 0:
            return None
        return Events(*(np.concatenate([e, *c]) for e, *c in zip(_NOTHING, *self._parts, strict=True)))
