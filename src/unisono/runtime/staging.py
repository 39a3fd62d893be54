"""What ranks stage for those of other hosts between two meetings: spans of the segment, found in their tables.

Positions are (iteration, number in the body) of a meeting; (0, -1) is before the first one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from unisono.program.bind import Table
from unisono.program.over_hosts import following, passed
from unisono.program.slots import slot_readers
from unisono.runtime.network import MEETING_ROOM
from unisono.runtime.outbox import SPAN, Described, Spans, joined
from unisono.runtime.prepared import Prepared
from unisono.transport.host import HostMap
from unisono.transport.segment import Segment

__all__ = ["FIRST", "TOGETHER", "Position", "Staging", "Step", "fits_alone"]

TOGETHER = 128 << 10
"""Bytes of a frame for all ranks of a host at a call's first meeting; what is longer goes by the connections of all."""
_TOGETHER_LATER = 256 << 10
"""The same at later meetings of overlapping pieces, whose frames leave while the next piece is reduced: of connections
that share a link one is always behind. At first meetings, which nothing overlaps, so long frames were no faster.
"""
_KEPT = 4096
_Found = TypeVar("_Found")
Position = tuple[int, int]
FIRST: tuple[Position, Position] = (0, -1), (0, 0)
"""The part of a program before its first meeting."""


class Step(NamedTuple):
    """What a meeting of overlapping pieces, after the first one, takes over hosts.

    ``sends``: by host for which this rank has data, its spans; ``together``: by host for which all ranks of this one
    have little, by rank, all their spans, in one frame.
    ``absent``: ranks whose proxy this is and of which nothing is due; ``begun``: those whose data of the first meeting
    is due, in frames of their own.
    """

    sends: tuple[tuple[int, Described], ...]
    together: tuple[tuple[int, tuple[tuple[int, Described], ...]], ...]
    absent: tuple[int, ...]
    begun: tuple[int, ...]


class Staging:
    """The spans of a group of ``size`` ranks in its segment; all that is found is kept for the next call."""

    def __init__(self, segment: Segment, hosts: HostMap, size: int) -> None:
        self._layout, self._hosts, self._size = segment.layout, hosts, size
        self._found: dict[tuple[int, ...], tuple[Table, list[Spans]]] = {}
        self._nexts: dict[tuple[int, ...], tuple[Table, Position | None]] = {}
        self._tables: dict[tuple[int, int, bytes], tuple[Table, Table]] = {}
        self._steps: dict[tuple[int, int, int], tuple[Table, Step | None]] = {}

    def spans(self, prepared: Prepared, table: Table, before: Position, now: Position, parity: int) -> list[Spans]:
        """By host, what the rank of ``table`` stages between two meetings, and ranks there read.

        ``parity``: of the call's first meeting.
        """
        key = (id(table), *before, *now, parity)
        return _kept(self._found, key, table, lambda: self._find(prepared, table, before, now, parity))

    def _find(self, prepared: Prepared, table: Table, before: Position, now: Position, parity: int) -> list[Spans]:
        layout, size, own = self._layout, self._size, self._hosts.of[table.program.rank]
        readers = slot_readers(prepared.schedule, table.program.placement, table.program.deterministic)
        found: list[Spans] = [[] for _ in self._hosts.hosts]
        for iteration, met in passed(before, now, table.meets):
            for write in table.stage_writes:
                piece = iteration - write.lag
                nbytes = min(write.most, write.left - piece * write.shrink)
                if write.meets != met or not 0 <= piece < table.pieces or nbytes <= 0:
                    continue
                half = (parity + iteration * table.meets + write.other) & 1
                at = layout.stages + (half * size + write.rank) * layout.area + write.at
                for host in {self._hosts.of[reader] for reader in readers.get((write.rank, write.index), ())}:
                    if host != own:
                        found[host].append((at, nbytes))
        return [joined(spans) for spans in found]

    def following(self, table: Table, now: Position) -> Position | None:
        """The meeting after one; None if it is the last."""
        return _kept(self._nexts, (id(table), *now), table, lambda: following(table, now))

    def table_of(self, prepared: Prepared, peer: int, headers: bytes = b"") -> Table:
        """The table of a rank, with the sizes that all have agreed on or that the ``headers`` of all give."""
        table, sized = prepared.staged, headers if prepared.call.sends else b""
        return _kept(self._tables, (id(table), peer, sized), table, lambda: prepared.staged_of(peer, sized))

    def step(self, prepared: Prepared, number: int, parity: int, fits: Callable[[Spans], bool]) -> Step | None:
        """What meeting ``number`` of a call whose pieces overlap takes; None if it has no such meeting.

        ``fits``: whether spans go in the frame of a host.
        """
        table = prepared.staged

        def make() -> Step | None:
            return self._step(prepared, number, parity, fits) if number < table.meetings else None

        return _kept(self._steps, (id(table), number, parity), table, make)

    def _step(self, prepared: Prepared, number: int, parity: int, fits: Callable[[Spans], bool]) -> Step:
        due, sends, together, absent, begun = number - prepared.staged.late, [], [], [], []
        tables = {rank: self.table_of(prepared, rank) for rank in self._hosts.local}
        found = {rank: self.spans(prepared, each, *_part(each, number), parity) for rank, each in tables.items()}
        for host in range(len(self._hosts.hosts)):
            staged = [(rank, Described.of(spans[host])) for rank, spans in found.items() if spans[host]]
            if 0 < sum(nbytes for spans in found.values() for _, nbytes in spans[host]) <= _TOGETHER_LATER:
                together.append((host, tuple(staged)))
            else:
                sends += [(host, spans) for rank, spans in staged if rank == self._hosts.rank]
        for peer in self._hosts.proxied:
            spans = []
            if due >= 0:
                theirs = self.table_of(prepared, peer)
                spans = self.spans(prepared, theirs, *_part(theirs, due), parity)[self._hosts.mine]
            if not spans or (due == 0 and fits(spans)):
                absent.append(peer)
            elif due == 0:
                begun.append(peer)
        return Step(tuple(sends), tuple(together), tuple(absent), tuple(begun))


def _kept(
    kept: dict[Any, tuple[Table, _Found]], key: tuple[Any, ...], table: Table, make: Callable[[], _Found]
) -> _Found:
    """What ``make`` gives, once per key, which has the id of ``table``: that is kept as long."""
    found = kept.get(key)
    if found is None:
        if len(kept) >= _KEPT:
            kept.clear()
        found = kept[key] = (table, make())
    return found[1]


def _part(table: Table, number: int) -> tuple[Position, Position]:
    """The part of a program of overlapping pieces before a meeting: the one before, and itself."""
    before, now = divmod(number - 1, table.meets), divmod(number, table.meets)
    return (before, now) if number else FIRST


def fits_alone(spans: Spans) -> bool:
    """True if they go in a frame of one rank."""
    return sum(nbytes + SPAN.size for _, nbytes in spans) <= MEETING_ROOM
