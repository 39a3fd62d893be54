"""Meetings of ranks on several hosts: what a rank stages is sent to the hosts that read it, and lands there.

Each host has a segment of its own, laid out for all ranks of the group: the places of ranks on other hosts in it mirror
theirs. The interpreter runs programs as on one host; at every meeting it returns, and this rank sends to each other
host, to one rank there (`HostMap.proxy`), a frame with its header and with what it has staged since the last meeting
and a rank there will read. The proxy writes all of it to the same places of its own segment, and arrives for the
sender. So a value is summed from the same parts, in the same order, wherever the ranks are.

A frame of a later meeting waits until the receiver stands at that meeting: then all ranks of its host have arrived at
the one before, and none reads what the frame overwrites.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

from unisono.program.bind import KIND, LEFT, MEET, WORDS, Table
from unisono.program.slots import slot_readers
from unisono.runtime.control import Control
from unisono.runtime.network import MEETING, Network
from unisono.runtime.prepared import Prepared
from unisono.transport.board import Board
from unisono.transport.layout import CALL, COMPLETED, COMPLETED_AT, HEADER, ISSUED, MEETINGS
from unisono.transport.mesh import Channel, Receive

__all__ = ["Crossing"]

_HEAD = struct.Struct("<QQQIIII")  # meeting; calls issued, completed; bytes of header and text; spans; whether inline
_SPAN = struct.Struct("<QQ")  # offset in the segment, bytes
_KEPT = 4096
_Spans = list[tuple[int, int]]


class _InUse:
    """Counts users of memory; calls a function once there are none."""

    def __init__(self) -> None:
        self._guard, self._users = threading.Lock(), 0
        self._then: Callable[[], None] | None = None

    def add(self) -> None:
        """Counts one more."""
        with self._guard:
            self._users += 1

    def done(self) -> None:
        """Counts one less."""
        with self._guard:
            self._users -= 1
            then = self._then if not self._users else None
        if then is not None:
            then()

    def afterwards(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once there are none."""
        with self._guard:
            if self._users:
                self._then = then
                return
        then()


class Crossing:
    """Sends what one rank stages to the other hosts, and lays down what it receives as a proxy.

    At the first meeting of a program every rank sends a frame to every host, so that all headers are there. After that
    ranks agree: each knows from the tables of the others (`Prepared.staged_of`) what comes next, posts the receives
    before it does its own part, and a rank that has nothing for a host sends nothing.
    """

    def __init__(self, board: Board, control: Control, network: Network) -> None:
        self._board, self._control, self._network = board, control, network
        self._segment, self._hosts = board.segment, network.hosts
        self._sent_at = self._passed = -1  # the meetings for which this rank has sent, and that it found complete last
        self._before = (0, -1)  # iteration and meeting of the body that it has sent for, of the call under way
        self._turn = threading.Condition()
        self._stands_at = -1
        self._leaving = _InUse()  # staging memory that is sent from since the last meeting
        self._found: dict[tuple[int, ...], tuple[Table, list[_Spans]]] = {}
        self._tables: dict[tuple[int, int], tuple[Table, Table]] = {}
        network.deliver_meeting = self._land
        network.closing.append(self._close)

    def cross(self, prepared: Prepared, words: bool = False) -> bool:
        """Sends for the meeting at which the interpreter waits, once; returns whether the meeting is complete.

        ``words``: this rank's text on a call that differs goes with it.
        """
        meeting = self._board.position[0]
        if self._sent_at != meeting:
            self._stand_at(meeting)
            self._send(prepared, meeting, words)
            self._sent_at = meeting
        if not self._board.full():
            return False
        if self._passed != meeting:
            self._passed = meeting
            self._expect_next(prepared, meeting)
        return True

    def passes(self, prepared: Prepared) -> bool:
        """True unless the interpreter waits at a meeting that is not complete."""
        return not self._control.arrived or self.cross(prepared)

    def _stand_at(self, meeting: int) -> None:
        """Lets the frames of a meeting in."""
        with self._turn:
            self._stands_at = max(meeting, self._stands_at)
            self._turn.notify_all()

    def _close(self, deadline: float) -> None:
        """Lets waiting frames go: they are dropped."""
        self._stand_at(1 << 62)

    # Sending

    def _send(self, prepared: Prepared, meeting: int, words: bool) -> None:
        first, iteration, row = self._control.position
        table = prepared.staged
        now = iteration, int((table.rows[: row // WORDS, KIND] == MEET).sum())
        begins = meeting == first
        spans = self._spans(prepared, table, (0, -1) if begins else self._before, now, first & 1)
        self._before = now
        before, self._leaving = self._leaving, _InUse()
        for host, found in enumerate(spans):
            if host == self._hosts.mine or not (found or begins):
                continue
            channel = self._network.meetings[self._hosts.proxy(self._board.rank, host)]
            fits = self._fits(found)
            if begins or fits:
                fits = self._send_frame(channel, prepared, meeting, found, begins, words)
            if not fits:
                self._leaving.add()
                channel.send_data([self._segment.bytes[at : at + nbytes] for at, nbytes in found], self._leaving.done)
        # That half of the staging memory is written again after this meeting.
        before.afterwards(partial(self._board.arrive, meeting))

    def _fits(self, spans: _Spans) -> bool:
        """True if they go in one frame."""
        return _HEAD.size + sum(_SPAN.size + nbytes for _, nbytes in spans) <= self._network.room

    def _send_frame(
        self, channel: Channel, prepared: Prepared, meeting: int, spans: _Spans, begins: bool, words: bool
    ) -> bool:
        """Sends a frame; returns whether the data is in it."""
        segment, rank = self._segment, self._board.rank
        header = text = b""
        if prepared.guarded and begins:
            start, stop = self._board.header_span(meeting & 1, rank)
            header = segment.raw[start:stop]
        if words:
            text = segment.text(rank, CALL).encode()
        lead = b"".join([*(_SPAN.pack(*span) for span in spans), header, text])
        inline = _HEAD.size + len(lead) + sum(nbytes for _, nbytes in spans) <= self._network.room
        counts = segment.longs[segment.field(rank, ISSUED)], segment.longs[segment.field(rank, COMPLETED)]
        head = _HEAD.pack(meeting, *counts, len(header), len(text), len(spans), inline)
        data = [segment.raw[at : at + nbytes] for at, nbytes in spans if inline]
        channel.send(MEETING, b"".join([head, lead, *data]))
        return inline

    def _spans(
        self, prepared: Prepared, table: Table, before: tuple[int, int], now: tuple[int, int], parity: int
    ) -> list[_Spans]:
        """By host, what the rank of ``table`` stages between two meetings, and ranks there read."""
        key = (id(table), *before, *now, parity)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _KEPT:
                self._found.clear()
            found = self._found[key] = (table, self._find(prepared, table, before, now, parity))
        return found[1]

    def _find(
        self, prepared: Prepared, table: Table, before: tuple[int, int], now: tuple[int, int], parity: int
    ) -> list[_Spans]:
        layout, size, own = self._segment.layout, self._board.size, self._hosts.of[table.program.rank]
        readers = slot_readers(prepared.schedule, table.program.placement, table.program.deterministic)
        found: list[_Spans] = [[] for _ in self._hosts.hosts]
        for iteration, passed in _segments(before, now, table.meets):
            for write in table.stage_writes:
                piece = iteration - write.lag
                nbytes = min(write.most, write.left - piece * write.shrink)
                if write.meets != passed or not 0 <= piece < table.pieces or nbytes <= 0:
                    continue
                half = (parity + iteration * table.meets + write.other) & 1
                at = layout.stages + (half * size + write.rank) * layout.stage + write.at
                for host in {self._hosts.of[reader] for reader in readers.get((write.rank, write.index), ())}:
                    if host != own:
                        found[host].append((at, nbytes))
        return [_joined(spans) for spans in found]

    # What comes next

    def _expect_next(self, prepared: Prepared, meeting: int) -> None:
        """Posts what is to come for the next meeting of the program; for the first one of the next program, frames."""
        table, first = prepared.staged, self._control.position[0]
        then = _next(table, self._before)
        if then is not None:
            for peer in self._hosts.proxied:
                theirs = self._table_of(prepared, table, peer)
                spans = self._spans(prepared, theirs, self._before, then, first & 1)[self._hosts.mine]
                if not spans:
                    self._arrive_for(peer, meeting + 1)
                elif not self._fits(spans):
                    tensors = [self._segment.bytes[at : at + nbytes] for at, nbytes in spans]
                    self._network.meetings[peer].expect_data(tensors, partial(self._arrive_for, peer, meeting + 1))
        self._stand_at(meeting + 1)

    def _table_of(self, prepared: Prepared, table: Table, peer: int) -> Table:
        key = (id(table), peer)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _KEPT:
                self._tables.clear()
            found = self._tables[key] = (table, prepared.staged_of(peer))
        return found[1]

    def _arrive_for(self, peer: int, meeting: int) -> None:
        """Arrives at a meeting in the place of a rank whose data is there."""
        self._segment.longs[self._segment.field(peer, MEETINGS)] = meeting + 1
        self._board.arrive(meeting)

    # Receiving

    def _land(self, peer: int, body: memoryview, receive: Receive) -> None:
        """Lays down what ``peer`` has sent for a meeting, and arrives for it."""
        meeting, issued, completed, header_nbytes, text_nbytes, count, inline = _HEAD.unpack_from(body)
        with self._turn:
            self._turn.wait_for(lambda: self._stands_at >= meeting)
            if self._stands_at != meeting:
                return
        at = _HEAD.size + count * _SPAN.size
        spans = [_SPAN.unpack_from(body, _HEAD.size + k * _SPAN.size) for k in range(count)]
        header, text = body[at : at + header_nbytes], body[at + header_nbytes : at + header_nbytes + text_nbytes]
        data = body[at + header_nbytes + text_nbytes :]
        segment, layout = self._segment, self._segment.layout
        for offset, nbytes in spans:
            if not layout.stages <= offset <= offset + nbytes <= layout.total:
                raise RuntimeError(f"rank {peer} sent {nbytes} bytes for offset {offset}, outside of staging memory")
        if inline:
            for offset, nbytes in spans:
                segment.raw[offset : offset + nbytes] = data[:nbytes]
                data = data[nbytes:]
        else:
            receive([segment.bytes[offset : offset + nbytes] for offset, nbytes in spans])
        if header:
            start, stop = self._board.header_span(meeting & 1, peer)
            segment.raw[start:stop] = header
            segment.longs[segment.field(peer, HEADER)] = start
        if text:
            segment.set_text(peer, CALL, bytes(text).decode())
        self._record(peer, issued, completed)
        self._arrive_for(peer, meeting)

    def _record(self, peer: int, issued: int, completed: int) -> None:
        longs, field = self._segment.longs, self._segment.field
        if completed != longs[field(peer, COMPLETED)]:
            longs[field(peer, COMPLETED_AT)] = self._network.clock()
        longs[field(peer, ISSUED)], longs[field(peer, COMPLETED)] = issued, completed


def _segments(before: tuple[int, int], now: tuple[int, int], meets: int) -> list[tuple[int, int]]:
    """(iteration, meetings of the body passed in it) of the parts of a body that ran between two meetings."""
    found, (iteration, passed) = [], (before[0], before[1] + 1)
    while True:
        if passed > meets:
            iteration, passed = iteration + 1, 0
        found.append((iteration, passed))
        if (iteration, passed) == now:
            return found
        passed += 1


def _next(table: Table, now: tuple[int, int]) -> tuple[int, int] | None:
    """Iteration and number, in the body, of the meeting after one; None if it is the last."""
    beyond = [row[LEFT] for row in table.rows.tolist() if row[KIND] == MEET]
    iteration, passed = now
    while iteration < table.pieces + table.lags:
        passed += 1
        if passed >= len(beyond):
            iteration, passed = iteration + 1, 0
        if iteration < table.pieces + beyond[passed]:
            return iteration, passed
    return None


def _joined(spans: Sequence[tuple[int, int]]) -> _Spans:
    """Neighbours as one."""
    found: _Spans = []
    for at, nbytes in sorted(set(spans)):
        if found and found[-1][0] + found[-1][1] == at:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        else:
            found.append((at, nbytes))
    return found
