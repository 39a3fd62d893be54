"""Bytes per link of a simulated run."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule import Topology
from unisono.simulate.clock import Times
from unisono.simulate.slots import Load, Part, Slot

__all__ = ["Traffic", "TrafficLog"]


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
        """What was counted."""
        self._merge()
        nothing = (np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64))
        pair, nbytes, messages = self._parts[0] if self._parts else nothing
        return Traffic(pair // self._nodes, pair % self._nodes, nbytes, messages)
