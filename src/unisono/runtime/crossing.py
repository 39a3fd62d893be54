"""Meetings of ranks on several hosts: what a rank stages is sent to the hosts that read it, and lands there.

Each host has a segment of its own, laid out for all ranks of the group: the places of ranks on other hosts in it mirror
theirs. The interpreter runs programs as on one host; at every meeting it returns, and this rank publishes what it has
staged since the last meeting and other hosts read (outbox.py). The last rank of a host to do so sends one frame to each
other host, with the headers and the data of all ranks of its own, to one rank there (`HostMap.receiver`), which writes
all of it to the same places of its own segment, and arrives for the senders. Longer data goes from rank to rank
(`HostMap.proxy`), so that all connections share it. So a value is summed from the same parts, in the same order,
wherever the ranks are.

Pieces that overlap (program/slots.py) go in frames of data alone, small ones of all ranks of a host in one, by one
connection, in order; their meetings wait for what was sent `Table.late` meetings before, and take what they need from a
table of steps (staging.py).

A frame of a later meeting waits until the receiver stands at that meeting: then all ranks of its host have arrived at
the one before, and none reads what the frame overwrites.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from unisono.program.bind import KIND, MEET, WORDS, Table
from unisono.runtime.control import Control
from unisono.runtime.frames import Frames
from unisono.runtime.in_use import InUse
from unisono.runtime.network import MEETING, MEETING_DATA, Network
from unisono.runtime.outbox import LATER, NOTHING, Described, Outboxes, Spans, packed
from unisono.runtime.prepared import Prepared
from unisono.runtime.staging import FIRST, TOGETHER, Position, Staging, Step, fits_alone
from unisono.runtime.words import WAITS
from unisono.transport import futex
from unisono.transport.board import Board
from unisono.transport.layout import MEETINGS
from unisono.transport.mesh import Channel

__all__ = ["Crossing"]

_KEPT = 4096
_PATIENCE = 0.003  # s that a call may wait at its meetings before it becomes a task
_AHEAD = 8  # frames of overlapping pieces after which one is waited for, with as many more on their way


class _Plan(NamedTuple):
    """What a rank sends for a meeting.

    ``spans``: by host, what it has staged; ``alone``, ``beside``: of these, what goes in a frame of its own, and what
    beside all frames; ``outbox``: the rest, as it is published; ``waits``: for all ranks to agree.
    """

    spans: list[Spans]
    alone: list[tuple[int, Described]]
    beside: list[int]
    outbox: bytes
    waits: bool


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
        hosts = self._hosts
        self._frames = Frames(board, hosts, network.clock)
        others = [host for host in range(len(hosts.hosts)) if host != hosts.mine]
        self._to = {host: network.meetings[hosts.proxy(board.rank, host)] for host in others}
        self._by_host = {  # by host: where this rank sends what all ranks of its own have together
            host: network.meetings[hosts.receiver(host, hosts.mine)]
            for host in others
            if hosts.receiver(hosts.mine, host) == board.rank
        }
        self._begun = {peer: board.segment.field(peer, MEETINGS) for peer in hosts.remote}
        self._outboxes = Outboxes(board.segment, board.rank, hosts.local, len(hosts.hosts))
        self._share = TOGETHER // max(map(len, hosts.hosts))  # bytes that a rank may have in a host's frame
        self._sent_at = self._passed = -1  # the meetings for which this rank has sent, and that it found complete last
        self._before: Position = (0, -1)  # the meeting that it has sent for, of the call under way
        self._step: Step | None = None  # what that meeting takes, if pieces overlap and it is not the call's first
        self._turn = threading.Condition()
        self._stands_at = self._first = -1  # the meeting whose frames are let in, the first one of its call
        self._landed: set[tuple[int, int]] = set()  # meetings of that call and hosts whose frames have come
        self._data_landed: dict[int, int] = {}  # by rank: the first meeting whose own frame has come
        self._early: dict[int, list[int]] = {}  # by meeting: ranks whose data has come before it
        self._awaited: dict[int, Callable[[], None]] = {}  # by rank: what to call when it comes
        self._undecided = False  # whether the call under way may end at its first meeting, as one that differs
        self._leaving = InUse()  # staging memory that is sent from since the last meeting
        self._unsettled: Callable[[], bool] | None = None  # what is left to do at a meeting once ranks agree
        self._plans: dict[tuple[int, ...], tuple[Table, _Plan]] = {}
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

    def run_on(self, prepared: Prepared, resume: Callable[[], int]) -> int:
        """Goes on with a call that waits at a meeting, by ``resume``, if no rank is late; returns its outcome."""
        limit, outcome = time.monotonic() + _PATIENCE, WAITS
        while outcome == WAITS:
            while not self.cross(prepared):
                if (left := limit - time.monotonic()) <= 0.0:
                    return WAITS
                self._board.sleep(left)
            outcome = resume()
        return outcome

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
        if here:
            self._arrive_for(here, meeting)

    def _close(self, deadline: float) -> None:
        """Lets waiting frames go: they are dropped."""
        self._stand_at(1 << 62, 1 << 62)

    # Sending

    def _send(self, prepared: Prepared, meeting: int, words: bool) -> None:
        first, iteration, row = self._control.position
        table = prepared.staged
        begins = meeting == first
        now = (0, 0) if begins else (iteration, int((table.rows[: row // WORDS, KIND] == MEET).sum()))
        plan = self._plan(prepared, table, (0, -1) if begins else self._before, now, first & 1)
        self._before = now
        before, self._leaving = self._leaving, InUse()
        for host, described in plan.alone:
            own = [(self._board.rank, described)]
            self._to[host].send(MEETING_DATA, self._frames.of_data(own, meeting, meeting))
        for host in plan.beside:
            self._send_data(host, plan.spans[host])
        self._outboxes.publish(meeting, plan.outbox)
        wakes = self._outboxes.complete(meeting) and self._send_frames(meeting, first, prepared.guarded, words)
        # That half of the staging memory is written again after this meeting.
        mark = partial(self._board.arrive, meeting, wakes)
        if plan.waits:
            self._unsettled = partial(self._settle, prepared, plan.spans, before, mark)
        else:
            before.afterwards(mark)

    def _plan(self, prepared: Prepared, table: Table, before: Position, now: Position, parity: int) -> _Plan:
        """What this rank sends of what it has staged between two meetings."""
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
            lone = {host for host, found in enumerate(spans) if out[host] == LATER and fits_alone(found)}
            alone = [(host, Described.of(spans[host])) for host in sorted(lone)]
            beside = [host for host, found in enumerate(spans) if found and out[host] == NOTHING]
            kept = self._plans[key] = (table, _Plan(spans, alone, beside, packed(waits, out), waits))
        return kept[1]

    def _fits(self, spans: Spans) -> bool:
        """True if they go in the frame of this host."""
        return len(spans) <= self._outboxes.most_spans and sum(nbytes for _, nbytes in spans) <= self._share

    def _send_step(self, step: Step, meeting: int, first: int, late: int) -> None:
        """Sends what this rank has for other hosts at a later meeting of overlapping pieces, and arrives there.

        What the ranks of this host have together is sent by one of them for each host, once all have published.
        """
        frames = [(self._to[host], [(self._board.rank, described)]) for host, described in step.sends]
        for_all = [(self._by_host[host], each) for host, each in step.together if host in self._by_host]
        before, noted = self._leaving, (meeting - first) % _AHEAD == 0 and bool(frames or for_all)
        if noted:
            self._leaving = InUse()

        def send(frames: Sequence[tuple[Channel, Sequence[tuple[int, Described]]]]) -> None:
            for channel, staged in frames:
                gone = self._leaving.add() if noted else None
                channel.send(MEETING_DATA, self._frames.of_data(staged, meeting, first, late), gone=gone)

        def finish(wakes: bool = False) -> None:
            if for_all:
                futex.acquire()
                send(for_all)
            if noted:  # a rank that waits for nobody's data may not be far ahead of those who take its own
                before.afterwards(partial(self._board.arrive, meeting, wakes))
            else:
                self._board.arrive(meeting, wakes)

        def settle() -> bool:
            if complete := self._outboxes.complete(meeting):
                finish()
            return complete

        send(frames)
        if not step.together:
            finish()
            return
        self._outboxes.publish(meeting, b"")
        if self._outboxes.complete(meeting):
            finish(wakes=len(for_all) < len(step.together))
        elif for_all:
            self._unsettled = settle
        else:
            finish()

    def _send_data(self, host: int, spans: Spans) -> None:
        self._leaving.add()
        self._to[host].send_data([self._segment.bytes[at : at + nbytes] for at, nbytes in spans], self._leaving.done)

    def _send_frames(self, meeting: int, first: int, guarded: bool, words: bool) -> bool:
        """Sends what all ranks of this host have published; returns whether ranks that sleep have to see it."""
        waits, staged = self._outboxes.read()
        for host in self._to:
            if parts := self._frames.of_host(host, staged, meeting, first, waits, guarded and meeting == first, words):
                self._network.meetings[self._hosts.receiver(host, self._hosts.mine)].send(MEETING, parts)
        return waits

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
                self._arrive_for([peer], meeting + 1)
            elif not self._fits(spans):
                self._expect_data(peer, spans, partial(self._arrive_for, [peer], meeting + 1))

    def _expect_step(self, prepared: Prepared, meeting: int, first: int) -> None:
        """Lets the data of the next meeting of overlapping pieces in, and arrives there for ranks that are not due."""
        self._step = step = self._staging.step(prepared, meeting + 1 - first, first & 1, self._fits)
        self._stand_at(meeting + 1, first if step is not None else meeting + 1)
        if step is not None:
            if step.absent:
                self._arrive_for(step.absent, meeting + 1)
            for peer in step.begun:
                self._await(peer, first, partial(self._arrive_for, [peer], meeting + 1))

    def _expect_data(self, peer: int, spans: Spans, done: Callable[[], None]) -> None:
        tensors = [self._segment.bytes[at : at + nbytes] for at, nbytes in spans]
        self._network.meetings[peer].expect_data(tensors, done)

    def _arrive_for(self, peers: Sequence[int], meeting: int, wakes: bool = False) -> None:
        """Arrives at a meeting in the place of ranks whose data is there."""
        for peer in peers:
            self._segment.longs[self._begun[peer]] = meeting + 1
        self._board.arrive(meeting, wakes, len(peers))

    # Receiving

    def _land(self, peer: int, body: memoryview) -> None:
        """Lays down what ``peer`` has sent for the ranks of its host at a meeting, and arrives for them."""
        meeting, first, wakes, count = self._frames.head(body)
        host = self._hosts.of[peer]
        with self._turn:
            if not self._lets_in(meeting, first) or (meeting, host) in self._landed:
                return
            self._landed.add((meeting, host))
        ranks = self._frames.unpack(peer, body, meeting, count)
        self._arrive_for(ranks, meeting, bool(wakes))

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
        """Writes a frame of data."""
        meeting, first, late, count = self._frames.head_of_data(body)
        then: Callable[[], None] | None = None
        with self._turn:
            if not self._lets_in(meeting, first):
                return
            ranks = self._frames.unpack_data(peer, body, count)
            if meeting == first:
                self._data_landed[peer] = meeting
                then = self._awaited.pop(peer, None)
            elif self._stands_at < meeting + late:
                self._early.setdefault(meeting + late, []).extend(ranks)
            else:
                then = partial(self._arrive_for, ranks, meeting + late)
        if then is not None:
            then()
