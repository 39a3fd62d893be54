"""The other hosts of a group, as one rank knows them: its channels to their ranks, and what became of these.

Two channels go to a rank of another host: one for messages and news, to every such rank; one for meetings
(crossing.py), between a rank and its proxies. Each has a thread that receives.
"""

import json
import struct
import threading
import time
from collections.abc import Callable, Sequence

from unisono.runtime.questions import Questions
from unisono.transport.handshake import Connected
from unisono.transport.host import HostMap
from unisono.transport.layout import AFFINITY, GAVE_UP, ISSUED, JOINED, LEFT, STATE
from unisono.transport.mesh import Channel, Mesh, Receive
from unisono.transport.process import Identity
from unisono.transport.segment import Segment

__all__ = ["MEETING", "RING_BYTES", "RING_COUNTS", "Network"]

MEETING, RING_BYTES, RING_COUNTS, _NEWS, _RECEIPT, _QUESTION, _ANSWER = range(7)
"""Kinds of frames."""
_MEETINGS, _MESSAGES = 1, 2
_FRAME = 4096  # bytes of a frame beside those of a header
_DELAY = {0: 0.25, GAVE_UP: 0.25, LEFT: 1.0}
"""Seconds after which a rank that is lost, has given up or has left will not arrive any more, as another rank of this
host, its proxy, may be slow to lay down what it has sent."""
_SLOW = 3.0  # s: the same for its proxy, which sees the last frame itself
_OTHER_CORES = 1  # the mark of a set of cores that no rank of this host has
_RANK = struct.Struct("<i")

_Land = Callable[[int, memoryview, Receive], None]


class Network:
    """The channels of this rank, ``rank`` of the group of ``global_ranks``, to the other hosts of ``hosts``.

    ``limit``: see `Mesh`.
    """

    def __init__(
        self, segment: Segment, hosts: HostMap, global_ranks: Sequence[int], connected: Connected, limit: float
    ) -> None:
        self.hosts, self._segment, self.global_ranks = hosts, segment, global_ranks
        self.deliver_meeting: _Land = lambda peer, body, receive: None
        self.deliver_message: Callable[[int, int, memoryview, Receive], None] = lambda peer, kind, body, receive: None
        self.unsent: Callable[[], bool] = lambda: False
        """True if this rank has sent messages that are not on their way yet."""
        self._issued: dict[int, int] = {}  # by rank: collectives, as it has answered
        self.closing: list[Callable[[float], None]] = []
        """Called before the channels end, with the moment (``time.monotonic``) until which they may take."""
        self._ended: dict[int, tuple[float, int, str]] = {}  # by rank: when, its state, its exit note or the error
        self._through: set[int] = set()  # ranks whose last frame for a meeting has been laid down
        self._proxied = set(hosts.proxied)
        self._receipts: set[int] = set()  # of ranks that have read that this one has left
        self._answered = threading.Condition()
        frame = _FRAME + -(-segment.layout.header // 256) * 256 + 256
        self._mesh = Mesh(connected, limit, frame, self._lost)
        self.room = self._mesh.room
        proxies = {hosts.proxy(hosts.rank, host) for host in range(len(hosts.hosts)) if host != hosts.mine}
        self.meetings = {
            peer: self._mesh.channel(peer, _MEETINGS, self._meeting) for peer in sorted(proxies | set(hosts.proxied))
        }
        self.messages: dict[int, Channel] = {
            peer: self._mesh.channel(peer, _MESSAGES, self._message) for peer in hosts.remote
        }
        self.questions = Questions(self.room, self._sender(_QUESTION), self._sender(_ANSWER))
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
        if kind == MEETING and self.hosts.proxy(peer, self.hosts.mine) == self.hosts.rank:
            self.deliver_meeting(peer, body, receive)
        elif kind == _NEWS:
            self._complete(peer)

    def _message(self, peer: int, kind: int, body: memoryview, receive: Receive) -> None:
        if kind in (RING_BYTES, RING_COUNTS):
            self.deliver_message(peer, kind, body, receive)
        elif kind == _NEWS:
            (state,) = _RANK.unpack_from(body)
            self._end(peer, state, bytes(body[_RANK.size :]).decode())
            if state == LEFT:
                self.messages[peer].send(_RECEIPT, b"")
        elif kind == _RECEIPT:
            with self._answered:
                self._receipts.add(peer)
                self._answered.notify_all()
        elif kind == _QUESTION:
            self.questions.asked(peer, body)
        elif kind == _ANSWER:
            self.questions.answered(body)

    def _lost(self, peer: int, tag: int, words: str) -> None:
        if tag == _MEETINGS and self.meetings[peer].drained:
            self._complete(peer)
        self._end(peer, 0, words)

    def _complete(self, peer: int) -> None:
        """Notes that a rank sends no frames for meetings any more, once all its data has been laid down."""
        self.meetings[peer].after_data(lambda: self._through.add(peer))

    def _end(self, peer: int, state: int, note: str) -> None:
        known = self._ended.get(peer)
        if known is None or (known[1] != LEFT and state):
            self._ended[peer] = (time.monotonic(), state, note)
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

    def proxy(self, rank: int) -> int:
        """The rank of this host that lays down what a rank of another one sends for meetings."""
        return self.hosts.proxy(rank, self.hosts.mine)

    def who(self, rank: int, name: int) -> str:
        """The rank, of global rank ``name``, in words."""
        return self.hosts.places[rank].who(name)

    def ended(self, rank: int) -> tuple[int, str] | None:
        """The state of a rank that has left, has given up or is lost (0), with its exit note; None otherwise."""
        found = self._ended.get(rank)
        if found is None:
            return None
        since, state, note = found
        if rank not in self._through and time.monotonic() < since + (_SLOW if rank in self._proxied else _DELAY[state]):
            return None
        return state, note

    def publish(self, state: int, note: str) -> None:
        """Notifies the ranks of other hosts that this rank has left or has given up; ``note``: its exit note."""
        body = _RANK.pack(state) + note.encode()[: self.room - 64]
        for channel in (*self.meetings.values(), *self.messages.values()):
            channel.send(_NEWS, body)

    def activities(self, ranks: Sequence[int], patience: float, placed: bool = False) -> dict[int, str]:
        """What ranks of other hosts do now, in the words of a rank of their host; empty for one of which none comes.

        ``placed``: behind what each has completed.
        """
        asked = [rank for rank in ranks if rank in self]
        peers = sorted({peer for rank in asked for peer in self.hosts.hosts[self.hosts.of[rank]]})
        answers = self.questions.ask_all(peers, "activity", json.dumps([asked, placed]).encode(), patience)
        found = [json.loads(answer) for answer in answers.values() if answer]
        return {rank: max((words.get(str(rank), "") for words in found), key=len, default="") for rank in asked}

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
        return lambda peer, body: self.messages[peer].send(kind, body)

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
        self._mesh.close(deadline)
        # Those who handle frames hold the group's memory, and it holds this: it ends here, not when Python collects it.
        self.closing.clear()
        self._segment.elsewhere = None
        self.questions.close()
        self.unsent = bool
        del self.deliver_meeting, self.deliver_message

    def disown(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._mesh.disown()

    def _parted(self, peer: int) -> bool:
        """True if a rank has read that this one has left, has left itself, or is lost."""
        return peer in self._receipts or self._ended.get(peer, (0, GAVE_UP))[1] != GAVE_UP
