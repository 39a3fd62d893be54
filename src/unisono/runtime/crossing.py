"""Meetings of ranks on several hosts: what a rank stages is sent to the hosts that read it, and lands there.

Each host has a segment of its own, laid out for all ranks of the group: the places of ranks on other hosts in it mirror
theirs. The interpreter runs programs as on one host; at every meeting it returns, and this rank publishes what it has
staged since the last meeting and other hosts read (outbox.py). The last rank of a host to do so sends one frame to each
other host, with the headers and the data of all ranks of its own, to one rank there (`HostMap.receiver`), which writes
all of it to the same places of its own segment, and arrives for the senders. Longer data goes from rank to rank
(`HostMap.proxy`), so that all connections share it. So a value is summed from the same parts, in the same order,
wherever the ranks are.

Pieces that overlap (program/slots.py) go in a frame of each rank; their meetings wait for what was sent `Table.late`
meetings before, and take what they need from a table of steps (staging.py).

A frame of a later meeting waits until the receiver stands at that meeting: then all ranks of its host have arrived at
the one before, and none reads what the frame overwrites.
"""

import struct
import threading
from collections.abc import Callable
from functools import partial

from unisono.program.bind import KIND, MEET, WORDS, Table
from unisono.runtime.control import Control
from unisono.runtime.in_use import InUse
from unisono.runtime.network import MEETING, MEETING_DATA, Network
from unisono.runtime.outbox import LATER, NOTHING, Outboxes, Spans
from unisono.runtime.prepared import Prepared
from unisono.runtime.staging import FIRST, SPAN, Position, Staging, Step, fits_alone
from unisono.transport import futex
from unisono.transport.board import Board
from unisono.transport.layout import CALL, COMPLETED, COMPLETED_AT, HEADER, ISSUED, MEETINGS

__all__ = ["Crossing"]

_HEAD = struct.Struct("<QQII")  # meeting, the call's first; whether ranks that sleep are woken; ranks in the frame
_RANK = struct.Struct("<IIIIQQ")  # rank; bytes of header and text; spans; calls issued, completed
_ALONE = struct.Struct("<QQII")  # meeting, the call's first; how much later it is due; spans
_KEPT = 4096
_AHEAD = 8  # frames of overlapping pieces after which one is waited for, with as many more on their way
_TOGETHER = 128 << 10
"""Bytes of a frame for all ranks of a host; what is longer goes by the connections of all of them."""


class Crossing:
    """Sends what one rank stages to the other hosts, and lays down what it receives as a proxy.

    At the first meeting of a program the frames have the headers of all ranks; longer data follows in frames of each
    rank, or, beyond their room, once ranks agree. After that each rank knows from the tables of the others
    (`Prepared.staged_of`) what comes next and posts the receives before it does its own part; a host that has nothing
    for another one sends nothing.
    """

    def __init__(self, board: Board, control: Control, network: Network) -> None:
        self._board, self._control, self._network = board, control, network
        self._segment, self._hosts = board.segment, network.hosts
        self._view = memoryview(board.segment.raw)
        hosts = self._hosts
        others = [host for host in range(len(hosts.hosts)) if host != hosts.mine]
        self._to = {host: network.meetings[hosts.proxy(board.rank, host)] for host in others}
        self._begun = {peer: board.segment.field(peer, MEETINGS) for peer in hosts.remote}
        self._outboxes = Outboxes(board.segment, board.rank, hosts.local, len(hosts.hosts))
        self._share = _TOGETHER // max(map(len, hosts.hosts))  # bytes that a rank may have in a host's frame
        self._sent_at = self._passed = -1  # the meetings for which this rank has sent, and that it found complete last
        self._before: Position = (0, -1)  # the meeting that it has sent for, of the call under way
        self._step: Step | None = None  # what that meeting takes, if pieces overlap and it is not the call's first
        self._turn = threading.Condition()
        self._stands_at = self._first = -1  # the meeting whose frames are let in, the first one of its call
        self._landed: set[tuple[int, int]] = set()  # meetings of that call and hosts whose frames have come
        self._early: dict[int, list[int]] = {}  # by meeting: ranks whose data has come before it
        self._data_landed: dict[int, int] = {}  # by rank: the first meeting whose own frame has come
        self._awaited: dict[int, Callable[[], None]] = {}  # by rank: what to call when it comes
        self._undecided = False  # whether the call under way may end at its first meeting, as one that differs
        self._leaving = InUse()  # staging memory that is sent from since the last meeting
        self._unsettled: Callable[[], bool] | None = None  # what is left to do at a meeting once ranks agree
        self._plans: dict[tuple[int, ...], tuple[Table, tuple[list[Spans], tuple[Spans | int, ...], bool]]] = {}
        self._staging = Staging(board.segment, hosts, board.size)
        network.deliver_meeting, network.deliver_data = self._land, self._land_data
        network.closing.append(self._close)

    def cross(self, prepared: Prepared, words: bool = False) -> bool:
        """Sends for the meeting at which the interpreter waits, once; returns whether the meeting is complete.

        ``words``: this rank's text on a call that differs goes with it.
        """
        meeting, first = self._board.position[0], self._control.position[0]
        if self._sent_at != meeting:
            if self._undecided and meeting > first:
                self._expect_next(prepared, first)
            self._undecided = False
            if meeting == first or self._step is None:
                self._stand_at(meeting, first)
                self._send(prepared, meeting, words)
            else:
                self._send_step(self._step, meeting, first, prepared.staged.late)
            self._sent_at = meeting
        self._board.note()
        if self._unsettled is not None and self._unsettled():
            self._unsettled = None
        if not self._board.full():
            return False
        if self._passed != meeting:
            self._passed = meeting
            if meeting == first:
                headers = self._board.headers_of(meeting & 1) if prepared.guarded else b""
                self._undecided = headers != prepared.expected  # the guard has to see them first
            if not self._undecided:
                self._expect_next(prepared, meeting)
        return True

    def passes(self, prepared: Prepared) -> bool:
        """True unless the interpreter waits at a meeting that is not complete."""
        return not self._control.arrived or self.cross(prepared)

    def _stand_at(self, meeting: int, first: int) -> None:
        """Lets the frames of a meeting in; ``first``: that of its call."""
        if self._stands_at >= meeting and self._first >= first:
            return
        with self._turn:
            if first > self._first:
                self._first = first
                self._landed.clear()
                self._early.clear()
            self._stands_at = max(meeting, self._stands_at)
            here = self._early.pop(meeting, ())
            self._turn.notify_all()
        for rank in here:
            self._arrive_for(rank, meeting)

    def _close(self, deadline: float) -> None:
        """Lets waiting frames go: they are dropped."""
        self._stand_at(1 << 62, 1 << 62)

    # Sending

    def _send(self, prepared: Prepared, meeting: int, words: bool) -> None:
        first, iteration, row = self._control.position
        table = prepared.staged
        begins = meeting == first
        now = (0, 0) if begins else (iteration, int((table.rows[: row // WORDS, KIND] == MEET).sum()))
        spans, out, waits = self._plan(prepared, table, (0, -1) if begins else self._before, now, first & 1)
        self._before = now
        before, self._leaving = self._leaving, InUse()
        for host, found in enumerate(spans):
            if out[host] == LATER and fits_alone(found):
                self._send_alone(host, meeting, found)
            elif found and out[host] == NOTHING:
                self._send_data(host, found)
        self._outboxes.publish(meeting, waits, out)
        wakes = self._outboxes.complete(meeting) and self._send_frames(meeting, first, prepared.guarded, words)
        # That half of the staging memory is written again after this meeting.
        mark = partial(self._board.arrive, meeting, wakes)
        if waits:
            self._unsettled = partial(self._settle, prepared, spans, before, mark)
        else:
            before.afterwards(mark)

    def _plan(
        self, prepared: Prepared, table: Table, before: Position, now: Position, parity: int
    ) -> tuple[list[Spans], tuple[Spans | int, ...], bool]:
        """By host, what this rank has staged and what its outbox shall have; whether it waits until all ranks agree."""
        key = (id(table), *before, *now, parity)
        kept = self._plans.get(key)
        if kept is None:
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            spans, begins = self._staging.spans(prepared, table, before, now, parity), before == (0, -1)
            out: list[Spans | int] = []
            for host, found in enumerate(spans):
                goes = host != self._hosts.mine and (begins or bool(found))
                fits = self._fits(found)
                out.append(found if goes and fits else LATER if goes and begins else NOTHING)
            later = not table.late and (LATER in out or self._comes_later(prepared, parity))
            waits = begins and (bool(prepared.call.sends) or later)
            kept = self._plans[key] = (table, (spans, tuple(out), waits))
        return kept[1]

    def _fits(self, spans: Spans) -> bool:
        """True if they go in the frame of this host."""
        return len(spans) <= self._outboxes.most_spans and sum(nbytes for _, nbytes in spans) <= self._share

    def _send_step(self, step: Step, meeting: int, first: int, late: int) -> None:
        """Sends what this rank has for other hosts at a later meeting of overlapping pieces, and arrives there."""
        noted = bool(step.sends) and (meeting - first) % _AHEAD == 0
        before = self._leaving
        if noted:
            self._leaving = InUse()
        for host, count, described, slices in step.sends:
            head, data = _ALONE.pack(meeting, first, late, count), (self._view[each] for each in slices)
            gone = self._leaving.add() if noted else None
            self._to[host].send(MEETING_DATA, [head, described, *data], gone=gone)
        if noted:  # a rank that waits for nobody's data may not be far ahead of those who take its own
            before.afterwards(partial(self._board.arrive, meeting))
        else:
            self._board.arrive(meeting)

    def _send_alone(self, host: int, meeting: int, spans: Spans) -> None:
        """Sends what this rank has for a host at the first meeting of a call in a frame of its own."""
        data = (self._view[at : at + nbytes] for at, nbytes in spans)
        head = _ALONE.pack(meeting, meeting, 0, len(spans))
        self._to[host].send(MEETING_DATA, [head, *(SPAN.pack(*span) for span in spans), *data])

    def _send_data(self, host: int, spans: Spans) -> None:
        self._leaving.add()
        self._to[host].send_data([self._segment.bytes[at : at + nbytes] for at, nbytes in spans], self._leaving.done)

    def _send_frames(self, meeting: int, first: int, guarded: bool, words: bool) -> bool:
        """Sends what all ranks of this host have published; returns whether ranks that sleep have to see it."""
        waits, every = self._outboxes.read()
        for host in range(len(self._hosts.hosts)):
            parts: list[bytes | memoryview] = [b""]
            count = 0
            for rank, out in every.items():
                if out[host] != NOTHING:
                    parts += self._part(rank, out[host], meeting, guarded and meeting == first, words)
                    count += 1
            if count:
                parts[0] = _HEAD.pack(meeting, first, waits, count)
                receiver = self._hosts.receiver(host, self._hosts.mine)
                self._network.meetings[receiver].send(MEETING, parts)
        return waits

    def _part(
        self, rank: int, spans: Spans | int, meeting: int, guarded: bool, words: bool
    ) -> list[bytes | memoryview]:
        """A rank's part of a frame."""
        segment, header, text = self._segment, b"", b""
        if guarded:
            start, stop = self._board.header_span(meeting & 1, rank)
            header = segment.raw[start:stop]
        if words:
            text = segment.text(rank, CALL).encode()
        own: Spans = [] if isinstance(spans, int) else spans
        counts = segment.longs[segment.field(rank, ISSUED)], segment.longs[segment.field(rank, COMPLETED)]
        return [
            _RANK.pack(rank, len(header), len(text), len(own), *counts), header, text,
            *(SPAN.pack(*span) for span in own), *(self._view[at : at + nbytes] for at, nbytes in own),
        ]  # fmt: skip

    def _comes_later(self, prepared: Prepared, parity: int) -> bool:
        """True if a rank whose proxy this is has data for this host's ranks that no frame holds, at a first meeting."""
        theirs = (self._from(prepared, peer, FIRST, parity) for peer in self._hosts.proxied)
        return not all(map(self._fits, theirs))

    def _from(self, prepared: Prepared, peer: int, part: tuple[Position, Position], parity: int) -> Spans:
        """What a rank of another host stages for this one between two meetings."""
        theirs = self._staging.table_of(prepared, peer)
        return self._staging.spans(prepared, theirs, *part, parity)[self._hosts.mine]

    def _settle(self, prepared: Prepared, spans: list[Spans], before: InUse, mark: Callable[[], None]) -> bool:
        """Once all headers of a first meeting are there and agree, exchanges the data that follows; False until then.

        This rank's ``mark`` comes once all of it is there.
        """
        if self._board.missing():
            return False
        futex.acquire()
        coming, mine, meeting = InUse(), self._hosts.mine, self._board.position[0]
        headers = self._board.headers_of(meeting & 1) if prepared.guarded else b""
        if prepared.agrees(headers):
            for peer in self._hosts.proxied:
                theirs = self._staging.table_of(prepared, peer, headers)
                found = self._staging.spans(prepared, theirs, *FIRST, meeting & 1)[mine]
                if not theirs.late and not self._fits(found):
                    coming.add()
                    if fits_alone(found):
                        self._await(peer, meeting, coming.done)
                    else:
                        self._expect_data(peer, found, coming.done)
            for host, found in enumerate(spans):
                if host != mine and not self._fits(found) and not fits_alone(found):
                    self._send_data(host, found)
        coming.afterwards(partial(before.afterwards, mark))
        return True

    # What comes next

    def _expect_next(self, prepared: Prepared, meeting: int) -> None:
        """Posts what is to come for the next meeting of the program; for the first one of the next program, frames."""
        table, first = prepared.staged, self._control.position[0]
        if table.late:
            self._expect_step(prepared, meeting, first)
            return
        then = self._staging.following(table, self._before)
        self._step = None
        self._stand_at(meeting + 1, first if then is not None else meeting + 1)
        if then is None:
            return
        for peer in self._hosts.proxied:
            spans = self._from(prepared, peer, (self._before, then), first & 1)
            if not spans:
                self._arrive_for(peer, meeting + 1)
            elif not self._fits(spans):
                self._expect_data(peer, spans, partial(self._arrive_for, peer, meeting + 1))

    def _expect_step(self, prepared: Prepared, meeting: int, first: int) -> None:
        """Lets the data of the next meeting of overlapping pieces in, and arrives there for ranks that are not due."""
        self._step = step = self._staging.step(prepared, meeting + 1 - first, first & 1, self._fits)
        self._stand_at(meeting + 1, first if step is not None else meeting + 1)
        if step is not None:
            for peer in step.absent:
                self._arrive_for(peer, meeting + 1)
            for peer in step.begun:
                self._await(peer, first, partial(self._arrive_for, peer, meeting + 1))

    def _expect_data(self, peer: int, spans: Spans, done: Callable[[], None]) -> None:
        tensors = [self._segment.bytes[at : at + nbytes] for at, nbytes in spans]
        self._network.meetings[peer].expect_data(tensors, done)

    def _arrive_for(self, peer: int, meeting: int, wakes: bool = False) -> None:
        """Arrives at a meeting in the place of a rank whose data is there."""
        self._segment.longs[self._begun[peer]] = meeting + 1
        self._board.arrive(meeting, wakes)

    # Receiving

    def _land(self, peer: int, body: memoryview) -> None:
        """Lays down what ``peer`` has sent for the ranks of its host at a meeting, and arrives for them."""
        meeting, first, wakes, count = _HEAD.unpack_from(body)
        host = self._hosts.of[peer]
        with self._turn:
            if not self._lets_in(meeting, first) or (meeting, host) in self._landed:
                return
            self._landed.add((meeting, host))
        at, ranks = _HEAD.size, []
        for _ in range(count):
            rank, *sizes = _RANK.unpack_from(body, at)
            if not (0 <= rank < self._board.size and self._hosts.of[rank] == host):
                raise RuntimeError(f"rank {peer} sent something for rank {rank}, which is not on its host")
            at = self._apply(rank, meeting, body, at + _RANK.size, *sizes)
            ranks.append(rank)
        for rank in ranks:
            self._arrive_for(rank, meeting, bool(wakes) and rank == ranks[-1])

    def _lets_in(self, meeting: int, first: int) -> bool:
        """Waits until a frame may be laid down; False if its call is over. ``_turn`` is held."""
        self._turn.wait_for(lambda: self._stands_at >= meeting and self._first >= first)
        return self._first == first

    def _await(self, peer: int, meeting: int, then: Callable[[], None]) -> None:
        """Calls ``then`` once the frame of a rank's own for a meeting is there."""
        with self._turn:
            there = self._data_landed.get(peer) == meeting
            if not there:
                self._awaited[peer] = then
        if there:
            then()

    def _land_data(self, peer: int, body: memoryview) -> None:
        """Writes what a rank has sent in a frame of its own."""
        meeting, first, late, count = _ALONE.unpack_from(body)
        then: Callable[[], None] | None = None
        with self._turn:
            if not self._lets_in(meeting, first):
                return
            self._write(peer, body, _ALONE.size, count)
            if meeting == first:
                self._data_landed[peer] = meeting
                then = self._awaited.pop(peer, None)
            elif self._stands_at < meeting + late:
                self._early.setdefault(meeting + late, []).append(peer)
            else:
                then = partial(self._arrive_for, peer, meeting + late)
        if then is not None:
            then()

    def _apply(
        self, rank: int, meeting: int, body: memoryview, at: int, header: int, text: int, count: int, issued: int,
        completed: int,
    ) -> int:  # fmt: skip
        """Lays down a rank's part of a frame that begins at ``at``; returns where it ends."""
        segment = self._segment
        if header:
            start, stop = self._board.header_span(meeting & 1, rank)
            segment.raw[start:stop] = body[at : at + header]
            segment.longs[segment.field(rank, HEADER)] = start
        at += header
        if text:
            segment.set_text(rank, CALL, bytes(body[at : at + text]).decode())
        at += text
        at = self._write(rank, body, at, count)
        self._record(rank, issued, completed)
        return at

    def _write(self, rank: int, body: memoryview, at: int, count: int) -> int:
        """Writes spans, and the data behind them, to staging memory; returns where it ends."""
        layout, spans = self._segment.layout, [SPAN.unpack_from(body, at + k * SPAN.size) for k in range(count)]
        at += count * SPAN.size
        for offset, nbytes in spans:
            if not layout.stages <= offset <= offset + nbytes <= layout.device_numbers:
                raise RuntimeError(f"rank {rank} sent {nbytes} bytes for offset {offset}, outside of staging memory")
            self._view[offset : offset + nbytes] = body[at : at + nbytes]
            at += nbytes
        return at

    def _record(self, peer: int, issued: int, completed: int) -> None:
        longs, field = self._segment.longs, self._segment.field
        if completed != longs[field(peer, COMPLETED)]:
            longs[field(peer, COMPLETED_AT)] = self._network.clock()
        longs[field(peer, ISSUED)], longs[field(peer, COMPLETED)] = issued, completed
