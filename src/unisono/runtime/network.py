"""The other hosts of a group, as one rank knows them: its channels to their ranks, and what became of these.

Two channels go to a rank of another host: one for messages and news, to every such rank; one for meetings
(crossing.py), between a rank and its proxies. Each has a thread that receives.
"""

import errno
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.program.slots import ROOM
from unisono.runtime.questions import Questions
from unisono.transport.host import HostMap
from unisono.transport.layout import AFFINITY, GAVE_UP, ISSUED, JOINED, LEFT, MEETINGS, STATE
from unisono.transport.mesh import Channel, Connected, Mesh, Receive
from unisono.transport.process import Identity
from unisono.transport.segment import Segment

__all__ = ["MEETING", "MEETING_DATA", "MEETING_ROOM", "RING_BYTES", "RING_COUNTS", "Network"]

MEETING, MEETING_DATA, RING_BYTES, RING_COUNTS = range(4)
_NEWS, _RECEIPT, _QUESTION, _ANSWER, _SHRINKING, _HEADER, _MESSAGE_END = range(4, 11)
"""Kinds of frames."""
_MEETINGS, _MESSAGES = 1, 2
MEETING_ROOM, _MESSAGE_ROOM = ROOM + (16 << 10), 16 << 10
"""Bytes of data that a frame takes: of a meeting; of a message."""
_DELAY = {0: 0.25, GAVE_UP: 0.25, LEFT: 5.0}
"""Seconds after which a rank that is lost, has given up or has left will not arrive any more, although it has begun
more meetings than have come here: other ranks send for it, and other ones of this host lay that down."""
_NEVER = 1 << 62  # meetings
_SILENCE = 1.0  # s: how much later than one rank of a silent host the others may be found lost
_SILENT = [os.strerror(n) for n in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)]
"""Ends of a connection for which the host, not the process, is to blame."""
_OTHER_CORES = 1  # the mark of a set of cores that no rank of this host has
_RANK = struct.Struct("<i")
_STATE = struct.Struct("<iQ")  # state, meetings begun
_NUMBER = struct.Struct("<Q")


class _Ended(NamedTuple):
    """What became of a rank: when this was known, its state (0: lost), its exit note or the error, meetings begun."""

    since: float
    state: int
    note: str
    met: int


_STAYS = _Ended(0.0, GAVE_UP, "", _NEVER)
_Land = Callable[[int, memoryview], None]


class Network:
    """The channels of this rank, ``rank`` of the group of ``global_ranks``, to the other hosts of ``hosts``."""

    def __init__(self, segment: Segment, hosts: HostMap, global_ranks: Sequence[int], connected: Connected) -> None:
        self.hosts, self._segment, self.global_ranks = hosts, segment, global_ranks
        self.deliver_meeting: _Land = lambda peer, body: None
        self.deliver_data: _Land = lambda peer, body: None
        self.deliver_message: Callable[[int, int, memoryview, Receive], None] = lambda peer, kind, body, receive: None
        self.deliver_header: Callable[[int, int, bytes], None] = lambda peer, number, header: None
        self.deliver_message_end: Callable[[int, bytes], None] = lambda peer, body: None
        self.unsent: Callable[[], bool] = lambda: False
        """True if this rank has sent messages that are not on their way yet."""
        self._issued: dict[int, int] = {}  # by rank: collectives, as it has answered
        self.closing: list[Callable[[float], None]] = []
        """Called before the channels end, with the moment (``time.monotonic``) until which they may take."""
        self._ended: dict[int, _Ended] = {}  # by rank
        self._broken: dict[int, tuple[float, str]] = {}  # by rank: when its connection ended, and the error
        self._shrinking: dict[int, str] = {}
        self._receipts: set[int] = set()  # of ranks that have read that this one has left
        self._answered = threading.Condition()
        self._gave_up = False
        self._mesh = Mesh(connected, self._lost)
        room = MEETING_ROOM + len(hosts.local) * (segment.layout.header + segment.layout.OUTBOX + segment.layout.TEXT)
        self.meetings = {peer: self._mesh.channel(peer, _MEETINGS, room, self._meeting) for peer in hosts.counterparts}
        room = max(_MESSAGE_ROOM, _NUMBER.size + segment.layout.header)
        self.messages: dict[int, Channel] = {
            peer: self._mesh.channel(peer, _MESSAGES, room, self._message) for peer in hosts.remote
        }
        self.questions = Questions(_MESSAGE_ROOM, self._sender(_QUESTION), self._sender(_ANSWER))
        longs = segment.longs
        for peer in hosts.remote:
            longs[segment.field(peer, STATE)] = JOINED
            longs[segment.field(peer, AFFINITY)] = _OTHER_CORES
        segment.elsewhere = self

    def start(self) -> None:
        """Begins to receive, once all who handle frames are there."""
        self._mesh.start()

    @staticmethod
    def clock() -> int:
        """Now, as the times of calls are written."""
        return time.monotonic_ns()

    # Frames

    def _meeting(self, peer: int, kind: int, body: memoryview, receive: Receive) -> None:
        receives = self.hosts.receiver(self.hosts.mine, self.hosts.of[peer]) == self.hosts.rank
        if kind == MEETING and receives:
            self.deliver_meeting(peer, body)
        elif kind == MEETING_DATA and (receives or peer in self.hosts.proxied):
            self.deliver_data(peer, body)

    def _message(self, peer: int, kind: int, body: memoryview, receive: Receive) -> None:
        if kind in (RING_BYTES, RING_COUNTS):
            self.deliver_message(peer, kind, body, receive)
        elif kind == _NEWS:
            state, met = _STATE.unpack_from(body)
            self._end(peer, state, bytes(body[_STATE.size :]).decode(), met)
            if state == LEFT:
                self.messages[peer].send(_RECEIPT, ())
        elif kind == _HEADER:
            self.deliver_header(peer, _NUMBER.unpack_from(body)[0], bytes(body[_NUMBER.size :]))
        elif kind == _MESSAGE_END:
            self.deliver_message_end(peer, bytes(body))
        elif kind == _SHRINKING:
            self._shrinking[peer] = bytes(body).decode()
        elif kind == _RECEIPT:
            with self._answered:
                self._receipts.add(peer)
                self._answered.notify_all()
        elif kind == _QUESTION:
            self.questions.asked(peer, body)
        elif kind == _ANSWER:
            self.questions.answered(body)

    def _lost(self, peer: int, tag: int, words: str) -> None:
        self._broken.setdefault(peer, (time.monotonic(), words))
        self._end(peer, 0, words)

    def _end(self, peer: int, state: int, note: str, met: int = _NEVER) -> None:
        known = self._ended.get(peer)
        if known is None or (known.state != LEFT and state):
            self._ended[peer] = _Ended(time.monotonic(), state, note, met)
            with self._answered:
                self._answered.notify_all()
        if state:
            self._segment.longs[self._segment.field(peer, STATE)] = state

    # The ranks elsewhere

    @property
    def local(self) -> Sequence[int]:
        """The ranks of this host."""
        return self.hosts.local

    @property
    def ranks_of_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, as schedules take them."""
        return tuple(map(tuple, self.hosts.hosts))

    def __contains__(self, rank: int) -> bool:
        """True if the rank is on another host."""
        return self.hosts.of[rank] != self.hosts.mine

    def proxies(self, rank: int) -> set[int]:
        """The ranks of this host that lay down what a rank of another one sends for meetings."""
        return {self.hosts.proxy(rank, self.hosts.mine), self.hosts.receiver(self.hosts.mine, self.hosts.of[rank])}

    def who(self, rank: int, name: int) -> str:
        """The rank, of global rank ``name``, in words."""
        return self.hosts.places[rank].who(name)

    def ended(self, rank: int) -> tuple[int, str] | None:
        """The state of a rank that has left, has given up or is lost (0), with its exit note; None otherwise."""
        found = self._ended.get(rank)
        if found is None:
            return None
        here = self._segment.longs[self._segment.field(rank, MEETINGS)]
        over = here >= found.met or time.monotonic() >= found.since + _DELAY[found.state]
        return (found.state, found.note) if over else None

    def gone(self, rank: int) -> tuple[int, str] | None:
        """The state of a rank that has left or is lost (0), with its exit note; None if it lives, even if it gave up.

        A host that does not answer is lost with all its ranks, though their connections do not end at one moment.
        """
        ended = self._ended.get(rank, _STAYS)
        if ended.state == LEFT:
            return LEFT, ended.note
        if rank in self._broken:
            return 0, self._broken[rank][1]
        ends = [self._broken[each] for each in self.hosts.hosts[self.hosts.of[rank]] if each in self._broken]
        silent = [words for when, words in ends if time.monotonic() > when + _SILENCE and _silent(words)]
        return (0, silent[0]) if silent and rank not in self._shrinking else None

    def shrinking(self, rank: int) -> str:
        """The text of that kind which a rank of another host has published; empty if it has not."""
        return self._shrinking.get(rank, "")

    def publish_shrinking(self, text: str) -> None:
        """Publishes this rank's text of that kind to the ranks of other hosts."""
        for peer, channel in self.messages.items():
            if self.gone(peer) is None:
                channel.send(_SHRINKING, (text.encode(),))

    def publish_header(self, number: int, header: bytes) -> None:
        """Publishes the header of this rank's call ``number`` on GPUs: to one rank of each other host, for all."""
        for host in range(len(self.hosts.hosts)):
            if host != self.hosts.mine:
                self.messages[self.hosts.proxy(self.hosts.rank, host)].send(_HEADER, (_NUMBER.pack(number), header))

    def publish_message_end(self, peer: int, body: bytes) -> None:
        """Publishes this rank's end of a message on GPUs to a rank of another host."""
        self.messages[peer].send(_MESSAGE_END, (body,))

    def address(self, rank: int) -> str:
        """The address of a rank's host on the way to the others."""
        return self.hosts.places[rank].address

    def publish(self, state: int, note: str) -> None:
        """Notifies the ranks of other hosts that this rank has left or has given up; ``note``: its exit note."""
        self._gave_up |= state == GAVE_UP
        met = self._segment.longs[self._segment.field(self.hosts.rank, MEETINGS)]
        parts = _STATE.pack(state, met), note.encode()[: _MESSAGE_ROOM - 64]
        for channel in self.messages.values():
            channel.send(_NEWS, parts)

    def activities(self, ranks: Sequence[int], patience: float) -> dict[int, tuple[str, str, str]]:
        """What ranks of other hosts have done, do now, and failed in, in the words of a rank of their host.

        Of ranks on other hosts that answer within ``patience`` seconds.
        """
        asked = [rank for rank in ranks if rank in self]
        peers = sorted({peer for rank in asked for peer in self.hosts.hosts[self.hosts.of[rank]]})
        answers = self.questions.ask_all(peers, "activity", json.dumps(asked).encode(), patience)
        found = [json.loads(answer) for answer in answers.values() if answer]
        by_rank = {rank: [words[str(rank)] for words in found if str(rank) in words] for rank in asked}
        return {rank: max(words, key=lambda parts: sum(map(len, parts))) for rank, words in by_rank.items() if words}

    def process(self, rank: int) -> Identity:
        """The process of a rank of another host."""
        return self.hosts.places[rank].process

    @property
    def nonce(self) -> str:
        """The nonce of the group."""
        return self._segment.nonce

    def issued_here(self) -> int:
        """The collectives that this rank has issued."""
        return int(self._segment.longs[self._segment.field(self.hosts.rank, ISSUED)])

    def issued(self, rank: int) -> int:
        """The collectives that a rank of another host has issued, as it has answered."""
        return self._issued.get(rank, 0)

    def note_issued(self, who: Identity, number: int) -> None:
        """Notes how many a process of another host has issued here."""
        for rank in self.hosts.remote:
            if self.process(rank) == who:
                self._issued[rank] = number

    def _sender(self, kind: int) -> Callable[[int, bytes], None]:
        return lambda peer, body: self.messages[peer].send(kind, (body,))

    def leave(self, note: str, seconds: float) -> None:
        """Sends what is left and publishes that this rank has left; then ends the channels and their threads.

        All of this takes ``seconds`` at most, and then the end of the threads. A connection is not ended before the
        peer has read what was sent: a peer that writes to one that is closed could lose what it has not read.
        """
        deadline = time.monotonic() + seconds
        for close in self.closing:
            close(deadline)
        self.publish(LEFT, note)
        with self._answered:
            parted = lambda: all(map(self._parted, self.hosts.remote))  # noqa: E731
            self._answered.wait_for(parted, deadline - time.monotonic())
        gone = [peer for peer in self.hosts.remote if self.gone(peer) is not None]
        data = not self._gave_up and all(each.state == LEFT for each in self._ended.values())
        self._mesh.close(deadline, data, gone)
        # Those who handle frames hold the group's memory, and it holds this: it ends here, not when Python collects it.
        self.closing.clear()
        self._segment.elsewhere = None
        self.questions.close()
        self.unsent = bool
        del self.deliver_meeting, self.deliver_data, self.deliver_message, self.deliver_header
        del self.deliver_message_end

    def disown(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._mesh.disown()

    def _parted(self, peer: int) -> bool:
        """True if a rank has read that this one has left, has left itself, or is lost."""
        return peer in self._receipts or self.gone(peer) is not None


def _silent(words: str) -> bool:
    """True if a connection ended because nothing came from the host any more."""
    return any(each in words for each in _SILENT)
