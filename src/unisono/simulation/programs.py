"""The times of programs by messages: what every rank executes of a schedule, on a topology that was measured.

`simulate` of a schedule plays an abstract machine; this plays the runtime's: messages of a step are posted together,
and a rank goes on when all of its step have come. Where ranks meet instead, tables.py plays what they run.

- A message whose ends post at s and r leaves at max(s, r + announcement), or later, in the order of readiness, where a
  port is busy; its last byte leaves after bytes * beta and is there alpha - announcement later. So a receive that was
  posted long before its send costs no round trip. The ports are those of the topology: a rank's own inside a host, the
  host's to the outside.
- Two messages that a rank sends, or receives, leave `further` seconds apart, at least.
- A message without elements is not posted.
- A copy takes bytes * memory.copy (nothing where no memory was measured), a sum that and bytes * gamma for every part
  after the first; where a host has fewer cores than ranks, they take their turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.program import Program, Row
from unisono.schedule import Collective, Link, Memory, Topology

__all__ = ["simulate_programs"]


@dataclass
class _Message:
    """One message; times in seconds, NaN for what has not happened."""

    nbytes: float = 0.0
    posted: float = float("nan")
    awaited: float = float("nan")
    left: float = float("nan")
    came: float = float("nan")

    @property
    def ready(self) -> bool:
        """True if both ends are posted and it has not travelled."""
        return self.posted == self.posted and self.awaited == self.awaited and self.came != self.came


_Key = tuple[int, int, int]
"""Step, source, destination."""


@dataclass
class _Rank:
    """One rank: its rows step by step, and how far it is."""

    rank: int
    rows: list[Row]
    time: float = 0.0
    at: int = 0
    posted: int = -1
    sends: dict[int, list[_Key]] = field(default_factory=dict)
    receives: dict[int, list[_Key]] = field(default_factory=dict)

    @property
    def row(self) -> Row | None:
        return self.rows[self.at] if self.at < len(self.rows) else None


def simulate_programs(
    programs: Sequence[Program], topology: Topology, nbytes: float, itemsize: int = 4
) -> NDArray[np.float64]:
    """The seconds at which each rank ends, float64, shape (ranks,).

    Args:
        programs: of all ranks, of one schedule, placed as messages.
        topology: with as many ranks.
        nbytes: of the collective, counted as in nccl-tests (Collective.chunk_nbytes).
        itemsize: bytes of an element. A block of fewer elements than it has chunks leaves some of them empty.

    Raises:
        UsageError: the programs are placed otherwise, or for another number of ranks, or wait for each other for ever.

    """
    if len(programs) != topology.world_size or [p.rank for p in programs] != list(range(len(programs))):
        raise UsageError(f"topology {topology.name} needs the programs of its {topology.world_size} ranks, in order")
    if any(program.placement != "messages" for program in programs):
        raise UsageError(
            f"{programs[0].name} is {programs[0].placement}, expected messages: simulate_tables plays meetings"
        )
    return _Play(programs, topology, _chunks(programs[0].collective, nbytes, itemsize)).run()


def _chunks(collective: Collective, nbytes: float, itemsize: int) -> list[float]:
    """Bytes of every chunk: those of a block are equal, of whole elements, but for the last ones."""
    pieces = collective.pieces
    block = collective.chunk_nbytes(nbytes) * pieces
    each = ceil(block / itemsize / pieces) * itemsize
    return [min(max(block - k * each, 0.0), each) for k in range(pieces)] * (collective.num_chunks // pieces)


class _Play:
    """The event loop: ranks run until they wait, then the message that is ready first travels."""

    def __init__(self, programs: Sequence[Program], topology: Topology, chunks: Sequence[float]) -> None:
        self.topology, self.chunks = topology, chunks
        self.empty = not any(chunks)  # of a barrier, messages without data travel
        self.messages: dict[_Key, _Message] = {}
        self.ranks = [_Rank(p.rank, list(p.rows)) for p in programs]
        for rank in self.ranks:
            self._collect(rank)
        self.free: dict[tuple[str, int], float] = {}
        self.memory = topology.memory or Memory(0.0, 0.0, 0.0, topology.ranks_per_host)
        self.turns = max(1.0, topology.ranks_per_host / self.memory.cores)

    def _collect(self, rank: _Rank) -> None:
        """The messages of a rank by step."""
        for step, rows in groupby(rank.rows, key=lambda row: row.step):
            for row in rows:
                if row.kind in ("send", "recv") and not (self.chunks[row.chunk] or self.empty):
                    continue
                if row.kind == "send":
                    key = step, rank.rank, row.peer
                    self.messages.setdefault(key, _Message()).nbytes += self.chunks[row.chunk]
                    rank.sends.setdefault(step, []).append(key)
                elif row.kind == "recv":
                    rank.receives.setdefault(step, []).append((step, row.peer, rank.rank))

    def run(self) -> NDArray[np.float64]:
        for rank in self.ranks:
            rank.time = self.memory.call
            self._advance(rank)
        while True:
            ready = [key for key, message in self.messages.items() if message.ready]
            if not ready:
                break
            self._travel(min(ready, key=lambda key: (self._leaves(key), key[1], (key[2] - key[1]) % len(self.ranks))))
        if any(rank.row is not None for rank in self.ranks):
            raise UsageError("the programs wait for each other for ever: verify them first")
        return np.array([rank.time for rank in self.ranks])

    def _link(self, key: _Key) -> Link:
        return self.topology.link(key[1], key[2])

    def _leaves(self, key: _Key) -> float:
        message = self.messages[key]
        return max(message.posted, message.awaited + self._link(key).announcement)

    def _travel(self, key: _Key) -> None:
        message, link = self.messages[key], self._link(key)
        work, busy = message.nbytes * link.beta, (("sends", key[1]), ("receives", key[2]))
        begin = max(self._leaves(key), *(self.free.get(end, 0.0) for end in busy))
        self.free |= dict.fromkeys(busy, begin + link.further)
        out, into = (int(port) for port in self.topology.ports(key[1], key[2]))
        message.left = self.free["out", out] = max(begin, self.free.get(("out", out), 0.0)) + work
        through = self.free["into", into] = max(begin, self.free.get(("into", into), 0.0)) + work
        message.came = max(message.left, through) + link.alpha - link.announcement
        for rank in key[1:]:
            self._advance(self.ranks[rank])

    def _advance(self, rank: _Rank) -> None:
        """Run a rank until it waits."""
        while (row := rank.row) is not None:
            if row.kind == "wait" and not self._all_came(rank, row.step):
                return
            if row.kind in ("send", "recv") and rank.posted != row.step:
                self._post(rank, row.step)
            elif row.kind in ("copy", "sum"):
                rank.time += self._work(row)
            rank.at += 1

    def _work(self, row: Row) -> float:
        extra = (len(row.parts) - 1) * self.topology.gamma if row.kind == "sum" else 0.0
        return self.chunks[row.chunk] * (len(row.to) * self.memory.copy + extra) * self.turns

    def _post(self, rank: _Rank, step: int) -> None:
        """All messages of a step."""
        rank.posted = step
        sends, receives = (list(dict.fromkeys(ends.get(step, ()))) for ends in (rank.sends, rank.receives))
        for key in (*receives, *sends):
            message = self.messages.setdefault(key, _Message())
            if key[1] == rank.rank:
                message.posted = rank.time
            else:
                message.awaited = rank.time

    def _all_came(self, rank: _Rank, step: int) -> bool:
        """True if the messages of a step are through; the rank's time is then that of the last."""
        ends = [self.messages[key].came for key in rank.receives.get(step, ())]
        ends += [self.messages[key].left for key in rank.sends.get(step, ())]
        if any(end != end for end in ends):
            return False
        rank.time = max([rank.time, *ends])
        return True
