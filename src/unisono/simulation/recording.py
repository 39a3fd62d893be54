"""The recording of a simulated run: every transfer of a small one, and the bytes per link of any."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.schedule import Schedule, Topology
from unisono.simulation.clock import Times
from unisono.simulation.slots import Load, Part

__all__ = ["EVENT_LIMIT", "EventLog", "Events", "Traffic", "traffic_of"]

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
        if messages > self._room:
            self._room = -1
        return self._room >= 0

    def see(self, parts: tuple[Part, ...], load: Load, times: Times) -> None:
        """Keep the events of one slot."""
        if not self.wants(len(load)):
            return
        self._room -= len(load)
        lengths = [len(part.compact) for part in parts]
        steps = np.repeat(np.array([part.step for part in parts], dtype=np.int64), lengths)
        pieces = np.repeat(np.array([part.piece for part in parts], dtype=np.int64), lengths)
        plain = [part.compact.at(part.offset) for part in parts]
        chunk = np.concatenate([s.chunk for s in plain]).astype(np.int64)
        count = np.concatenate([s.count for s in plain]).astype(np.int64)
        kept = (steps, pieces, load.src, load.dst, chunk, count, times.start, times.end, load.nbytes, load.reduce)
        self._parts.append(kept)

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


def traffic_of(schedule: Schedule, nbytes: float, chunks: int) -> Traffic:
    """What every pair of ranks exchanges for so many bytes, every chunk cut into `chunks` pieces."""
    nodes, steps = schedule.world_size + schedule.switches, schedule.steps
    nothing = np.zeros(0, dtype=np.int64)
    pairs = np.concatenate([nothing, *(step.src.astype(np.int64) * nodes + step.dst for step in steps)])
    sizes = [schedule.collective.nbytes_of(step.chunk, step.count, nbytes) * step.repeat for step in steps]
    messages = np.concatenate([nothing, *(np.full(len(step), step.repeat * chunks) for step in steps)])
    found, index = np.unique(pairs, return_inverse=True)
    counts = np.zeros(len(found), dtype=np.int64)
    np.add.at(counts, index, messages)
    moved = np.bincount(index, weights=np.concatenate([nothing, *sizes]), minlength=len(found))
    return Traffic(found // nodes, found % nodes, moved.astype(np.float64), counts)
