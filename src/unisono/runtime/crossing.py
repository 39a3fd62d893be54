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
from collections.abc import Sequence

from unisono.program.bind import KIND, MEET, WORDS, Table
from unisono.program.slots import slot_readers
from unisono.runtime.control import Control
from unisono.runtime.network import MEETING, Network
from unisono.runtime.prepared import Prepared
from unisono.transport.board import Board
from unisono.transport.layout import CALL, COMPLETED, COMPLETED_AT, HEADER, ISSUED, MEETINGS
from unisono.transport.mesh import Receive

__all__ = ["Crossing"]

_HEAD = struct.Struct("<QQQIIII")  # meeting; calls issued, completed; bytes of header and text; spans; whether inline
_SPAN = struct.Struct("<QQ")  # offset in the segment, bytes
_KEPT = 1024
_Spans = list[tuple[int, int]]


class Crossing:
    """Sends what one rank stages to the other hosts, and lays down what it receives as a proxy."""

    def __init__(self, board: Board, control: Control, network: Network) -> None:
        self._board, self._control, self._network = board, control, network
        self._segment, self._hosts = board.segment, network.hosts
        self._sent_at = -1  # the meeting for which this rank has sent
        self._before = (0, -1)  # iteration and meeting of the body that it has sent for, of the call under way
        self._turn = threading.Condition()
        self._stands_at = -1
        self._spans: dict[tuple[int, ...], tuple[Table, list[_Spans]]] = {}
        network.deliver_meeting = self._land
        network.closing.append(self._close)

    def cross(self, prepared: Prepared, words: bool = False) -> bool:
        """Sends for the meeting at which the interpreter waits, once; returns whether the meeting is complete.

        ``words``: this rank's text on a call that differs goes with it.
        """
        meeting = self._board.position[0]
        if self._sent_at != meeting:
            with self._turn:
                self._stands_at = meeting
                self._turn.notify_all()
            self._send(prepared, meeting, words)
            self._sent_at = meeting
            self._board.arrive(meeting)
        return self._board.full()

    def _close(self, seconds: float) -> None:
        """Lets waiting frames go: they are dropped."""
        with self._turn:
            self._stands_at = 1 << 62
            self._turn.notify_all()

    # Sending

    def _send(self, prepared: Prepared, meeting: int, words: bool) -> None:
        segment, rank, board = self._segment, self._board.rank, self._board
        first, iteration, row = self._control.position
        spans = self._staged(prepared, meeting == first, iteration, row)
        header = text = b""
        if prepared.guarded and meeting == first:
            start, stop = board.header_span(meeting & 1, rank)
            header = segment.raw[start:stop]
        if words:
            text = segment.text(rank, CALL).encode()
        counts = (segment.longs[segment.field(rank, ISSUED)], segment.longs[segment.field(rank, COMPLETED)])
        for host, found in enumerate(spans):
            if host == self._hosts.mine:
                continue
            lead = b"".join([*(_SPAN.pack(*span) for span in found), header, text])
            inline = _HEAD.size + len(lead) + sum(nbytes for _, nbytes in found) <= self._network.room
            head = _HEAD.pack(meeting, *counts, len(header), len(text), len(found), inline)
            peer, more = self._hosts.proxy(rank, host), []
            body = [head, lead]
            if inline:
                body += [segment.raw[at : at + nbytes] for at, nbytes in found]
            else:
                more = [segment.bytes[at : at + nbytes] for at, nbytes in found]
            self._network.meetings[peer].send(MEETING, b"".join(body), more)

    def _staged(self, prepared: Prepared, begins: bool, iteration: int, row: int) -> list[_Spans]:
        """By host, what this rank has staged since the last meeting and ranks there read."""
        table = prepared.staged
        passed = int((table.rows[: row // WORDS, KIND] == MEET).sum())
        before, self._before = (0, -1) if begins else self._before, (iteration, passed)
        parity = self._control.position[0] & 1
        key = (id(table), *before, iteration, passed, parity)
        found = self._spans.get(key)
        if found is None:
            if len(self._spans) >= _KEPT:
                self._spans.clear()
            found = self._spans[key] = (table, self._find(prepared, before, (iteration, passed), parity))
        return found[1]

    def _find(self, prepared: Prepared, before: tuple[int, int], now: tuple[int, int], parity: int) -> list[_Spans]:
        table, layout, size = prepared.staged, self._segment.layout, self._board.size
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
                    if host != self._hosts.mine:
                        found[host].append((at, nbytes))
        return [_joined(spans) for spans in found]

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
        self._record(peer, meeting, issued, completed)
        self._board.arrive(meeting)

    def _record(self, peer: int, meeting: int, issued: int, completed: int) -> None:
        longs, field = self._segment.longs, self._segment.field
        if completed != longs[field(peer, COMPLETED)]:
            longs[field(peer, COMPLETED_AT)] = self._network.clock()
        longs[field(peer, ISSUED)], longs[field(peer, COMPLETED)] = issued, completed
        longs[field(peer, MEETINGS)] = meeting + 1


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


def _joined(spans: Sequence[tuple[int, int]]) -> _Spans:
    """Neighbours as one."""
    found: _Spans = []
    for at, nbytes in sorted(set(spans)):
        if found and found[-1][0] + found[-1][1] == at:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        else:
            found.append((at, nbytes))
    return found
