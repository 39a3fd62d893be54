"""The recording of a simulated run: every transfer of a small one, and the bytes per link of any."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.schedule import Topology
from unisono.simulation.clock import Times
from unisono.simulation.slots import Load, Part, Slot

__all__ = ["EVENT_LIMIT", "EventLog", "Events", "Traffic", "TrafficLog"]

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
        """True if they still fit; from the first time they do not, nothing is collected."""
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
        """The events collected, None if there were too many."""
        if self._room < 0:
            return None
        return Events(*(np.concatenate([e, *c]) for e, *c in zip(_NOTHING, *self._parts, strict=True)))


@dataclass(frozen=True)
class Traffic:
    """Bytes per link: from src[i] to dst[i] went nbytes[i] in messages[i] transfers; each pair once, sorted."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: NDArray[np.float64]
    messages: NDArray[np.int64]

    @property
    def num_messages(self) -> int:
        """Transfers in all."""
        return int(self.messages.sum())

    def sent(self, nodes: int) -> NDArray[np.float64]:
        """Bytes that each rank sends."""
        return np.bincount(self.src, weights=self.nbytes, minlength=nodes).astype(np.float64)

    def by_kind(self, topology: Topology) -> dict[str, float]:
        """Bytes in all over each kind of link, by its name."""
        far = topology.outside(self.src, self.dst)
        inner, outer = topology.intra.name, (topology.inter or topology.intra).name
        kinds: dict[str, float] = {}
        for name, there in ((inner, ~far), (outer, far)):
            if there.any():
                kinds[name] = kinds.get(name, 0.0) + float(self.nbytes[there].sum())
        return kinds


class TrafficLog:
    """Adds up what every pair of ranks has exchanged."""

    _LIMIT = 1 << 21

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]] = []
        self._size = 0

    def wants(self, messages: int) -> bool:
        """Repeats can be multiplied, there is no need to see them."""
        return False

    def see(self, parts: tuple[Part, ...], load: Load, times: Times) -> None:
        """Count one slot."""
        self._add(load, 1)

    def miss(self, slot: Slot, load: Load) -> None:
        """Count all repeats of a slot."""
        self._add(load, slot.repeat)

    def _add(self, load: Load, repeat: int) -> None:
        pair = load.src * self._nodes + load.dst
        self._parts.append((pair, load.nbytes * repeat, np.full(len(load), repeat, dtype=np.int64)))
        self._size += len(load)
        if self._size > self._LIMIT:
            self._merge()

    def _merge(self) -> None:
        if not self._parts:
            return
        pair, nbytes, messages = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        pairs, index = np.unique(pair, return_inverse=True)
        counts = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(counts, index, messages)
        self._parts = [(pairs, np.bincount(index, weights=nbytes).astype(np.float64), counts)]
        self._size = len(pairs)

    def traffic(self) -> Traffic:
        """The counts."""
        self._merge()
        nothing = (np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64))
        pair, nbytes, messages = self._parts[0] if self._parts else nothing
        return Traffic(pair // self._nodes, pair % self._nodes, nbytes, messages)
