"""The times of bound programs over hosts: what every rank executes of a call, piece by piece, meeting by meeting.

- Between two meetings a rank runs the rows of its table, each on the piece that its lag leaves it. A copy takes bytes *
  memory.copy (nothing where no memory was measured), a sum that and bytes * gamma for every part after the first; where
  a host has fewer cores than ranks, they take turns.
- Once it has arrived at a meeting, a rank sends to another host what it has staged and ranks there read, in one frame.
  That leaves when the ports are free, `further` after the rank's frame before, its last byte after bytes * beta, and is
  there alpha - announcement later: receives are posted ahead.
- A meeting is complete on a host once all of its ranks have arrived (`meeting` later, if they are several) and all that
  is due has come: at the first one a frame from every host, with the headers of its ranks, and from then on what was
  sent `Table.late` meetings before. What is more than `ROOM` at the first one is sent when the headers have come.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.program import Table
from unisono.program.bind import COPY, KIND, LAG, LEFT, MEET, MOST, NARROW, SHRINK, SRC, SRC_AT, SUM, WIDEN
from unisono.program.slots import ROOM, readers_of
from unisono.schedule import Memory, Topology

__all__ = ["simulate_tables"]

_Slots = Mapping[tuple[int, int], set[int]]


class _Section(NamedTuple):
    """What a rank does between two meetings: seconds of work, then bytes for other hosts."""

    work: float
    sends: dict[int, int]


def simulate_tables(tables: Sequence[Table], topology: Topology) -> NDArray[np.float64]:
    """The seconds at which each rank ends, float64, shape (ranks,).

    Args:
        tables: of all ranks, of one schedule, placement and size, as `bind_over_hosts` makes them.
        topology: with as many ranks.

    Raises:
        UsageError: there are tables for another number of ranks.

    """
    if len(tables) != topology.world_size or [t.program.rank for t in tables] != list(range(len(tables))):
        raise UsageError(f"topology {topology.name} needs the tables of its {topology.world_size} ranks, in order")
    return _Play(tables, topology).run()


class _Play:
    """Meeting after meeting: who arrives when, what is sent then, when it is complete where."""

    def __init__(self, tables: Sequence[Table], topology: Topology) -> None:
        self.topology, self.late = topology, tables[0].late
        self.host = [int(host) for host in topology.host(np.arange(len(tables)))]
        self.memory = memory = topology.memory or Memory(0.0, topology.intra.alpha, 0.0, topology.ranks_per_host)
        self.turns = [max(1.0, len(ranks) / memory.cores) for ranks in topology.ranks_of_hosts]
        self.meeting = [memory.meeting if len(ranks) > 1 else 0.0 for ranks in topology.ranks_of_hosts]
        readers = readers_of(table.program for table in tables)
        self.sections = [self._sections(table, readers) for table in tables]
        self.free: dict[tuple[str, int], float] = {}
        self.came: dict[int, list[float]] = {}
        """By the meeting at which it is due: when what was sent came, the latest on each host."""

    def _sections(self, table: Table, readers: _Slots) -> list[_Section]:
        """What a rank does before each meeting, and after the last."""
        host, parts = self.host[table.program.rank], _parts(table)
        found, work, sends = [], 0.0, dict[int, int]()
        for iteration in range(table.pieces + table.lags):
            for number, (rows, beyond) in enumerate(parts):
                for row in rows:
                    nbytes = _length(iteration - row[LAG], table, row[LEFT], row[SHRINK], row[MOST])
                    operands, to = (row[SRC], row[SRC_AT]) if row[KIND] == SUM else (1, 1)
                    work += nbytes * (to * self.memory.copy + (operands - 1) * self.topology.gamma) * self.turns[host]
                for write in table.stage_writes:
                    nbytes = _length(iteration - write.lag, table, write.left, write.shrink, write.most)
                    if write.meets == number and nbytes:
                        there = {self.host[reader] for reader in readers.get((write.rank, write.index), ())}
                        for other in there - {host}:
                            sends[other] = sends.get(other, 0) + nbytes
                if iteration < table.pieces + beyond:
                    found.append(_Section(work, sends))
                    work, sends = 0.0, {}
        return [*found, _Section(work, sends)]

    def run(self) -> NDArray[np.float64]:
        hosts = self.topology.ranks_of_hosts
        complete = [self.memory.call] * len(hosts)
        for number in range(len(self.sections[0]) - 1):
            arrived = [complete[self.host[rank]] + each[number].work for rank, each in enumerate(self.sections)]
            local = [max(arrived[rank] for rank in ranks) for ranks in hosts]
            if number == 0:
                self._begin(arrived, local)
            else:
                self._send(number, arrived, [each[number].sends for each in self.sections])
            due = self.came.pop(number, [0.0] * len(hosts))
            complete = [max(local[h] + self.meeting[h], due[h]) for h in range(len(hosts))]
        return np.array([complete[self.host[rank]] + each[-1].work for rank, each in enumerate(self.sections)])

    def _begin(self, arrived: Sequence[float], local: Sequence[float]) -> None:
        """The first meeting: what has room goes at once, the headers of a host behind its last rank."""
        sends = [each[0].sends for each in self.sections]
        self._send(0, arrived, [{h: n for h, n in each.items() if n <= ROOM} for each in sends])
        hosts = self.topology.ranks_of_hosts
        for there, ranks in enumerate(hosts):
            for here, others in enumerate(hosts):
                if here != there:
                    self._travel(others[0], ranks[0], local[here], 0, 0)
        came = self.came.get(0, local)
        agreed = [max(local[host], came[host]) for host in self.host]
        self._send(0, agreed, [{h: n for h, n in each.items() if n > ROOM} for each in sends])

    def _send(self, number: int, arrived: Sequence[float], sends: Sequence[Mapping[int, int]]) -> None:
        """The frames of a meeting, in the order in which they are ready."""
        for rank in sorted(range(len(arrived)), key=lambda rank: (arrived[rank], rank)):
            for host, nbytes in sends[rank].items():
                ranks = self.topology.ranks_of_hosts[host]
                to = ranks[self.topology.ranks_of_hosts[self.host[rank]].index(rank) % len(ranks)]
                self._travel(rank, to, arrived[rank], nbytes, number + self.late)

    def _travel(self, rank: int, to: int, ready: float, nbytes: int, due: int) -> None:
        link, (out, into) = self.topology.link(rank, to), map(int, self.topology.ports(rank, to))
        begin = max(ready, self.free.get(("sends", rank), 0.0))
        self.free["sends", rank] = begin + link.further
        ports = ("out", out), ("in", into)
        ends = [max(begin, self.free.get(port, 0.0)) + nbytes * link.beta for port in ports]
        self.free |= zip(ports, ends, strict=True)
        there = self.came.setdefault(due, [0.0] * len(self.topology.ranks_of_hosts))
        host = self.host[to]
        there[host] = max(there[host], max(ends) + link.alpha - link.announcement)


def _length(piece: int, table: Table, left: int, shrink: int, most: int) -> int:
    """Bytes of a place in a piece."""
    return max(0, min(most, left - piece * shrink)) if 0 <= piece < table.pieces else 0


def _parts(table: Table) -> list[tuple[list[list[int]], float]]:
    """The rows that move bytes before each meeting of the body, and for how many iterations beyond the pieces it is."""
    parts: list[tuple[list[list[int]], float]] = []
    rows: list[list[int]] = []
    for row in table.rows.tolist():
        if row[KIND] == MEET:
            parts.append((rows, row[LEFT]))
            rows = []
        elif row[KIND] in (COPY, WIDEN, NARROW, SUM):
            rows.append(row)
    return [*parts, (rows, -inf)]
