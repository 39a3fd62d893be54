"""Messages between hosts: the rings of a pair of ranks, of which each host has a copy.

A rank writes to the copy of its own host as if the peer were beside it. A thread sends the bytes on, and the counts
that the peer's copy needs: what has been read, opened, wanted, refused. The ring's own capacity limits what is under
way, so that nothing that arrives has to wait for room.
"""

import struct
import threading
import time
from collections.abc import Sequence

from unisono.runtime.network import RING_BYTES, RING_COUNTS, Network
from unisono.transport import futex
from unisono.transport.layout import REFUSED
from unisono.transport.mesh import Receive
from unisono.transport.process import OwnThread
from unisono.transport.ring import Ring
from unisono.transport.segment import Segment

__all__ = ["MirroredRings"]

_BYTES = struct.Struct("<QQQI")  # place among all bytes, how many, messages posted, whether inline
_COUNTS = struct.Struct("<10Q")  # bytes read, messages opened, receives wanted; of refusals: see `Ring.reader_counts`
_MOST = 256 * 1024  # bytes that one frame announces at most
_PAUSE = 0.5  # s


class MirroredRings:
    """The rings between this rank and the ranks of other hosts; ``out``, ``into``: rings by peer."""

    def __init__(
        self, segment: Segment, rank: int, network: Network, out: Sequence[Ring], into: Sequence[Ring],
        bells: Sequence[futex.Counter],
    ) -> None:  # fmt: skip
        self._segment, self._rank, self._network = segment, rank, network
        self._out, self._in, self._bells = out, into, bells
        self._threads: dict[int, OwnThread] = {}
        self._starting = threading.RLock()
        self._ended = False
        self._done: dict[int, tuple[int, tuple[int, ...]]] = {}  # by peer: bytes and counts that were sent on
        network.deliver_message = self._land
        network.unsent = self._unsent
        network.closing.append(self._close)

    def use(self, peer: int) -> None:
        """Makes sure that what goes to and from ``peer`` is sent on, if that is on another host."""
        if peer in self._threads or peer not in self._network:
            return
        with self._starting:
            if peer not in self._threads and not self._ended:
                thread = OwnThread(target=self._run, args=(peer,), name=f"unisono to rank {peer}", daemon=True)
                self._threads[peer] = thread
                thread.start()

    def _unsent(self) -> bool:
        done = list(self._done.items())
        return len(done) < len(self._threads) or any(
            (self._out[peer].written(), self._in[peer].reader_counts()) != sent for peer, sent in done
        )

    def _close(self, deadline: float) -> None:
        """Sends on what is there, then ends the threads, waiting for them until ``deadline`` at most."""
        with self._starting:
            self._ended = True
        for peer in self._threads:
            self._bells[peer].add()
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, peer: int) -> None:
        """Sends on what this rank writes for ``peer``, and what it has read from it."""
        bell, out, into, channel = self._bells[peer], self._out[peer], self._in[peer], self._network.messages[peer]
        sent, counts = 0, into.reader_counts()
        self._done[peer] = sent, counts
        while True:
            seen, last = bell.value(), self._ended
            written = out.written()
            while sent < written:
                start = sent % out.capacity
                nbytes = min(written - sent, out.capacity - start, _MOST)
                inline = nbytes <= channel.room - _BYTES.size
                head = _BYTES.pack(sent, nbytes, out.posted(), inline)
                at = out.start + start
                if inline:
                    channel.send(RING_BYTES, (head, self._segment.raw[at : at + nbytes]))
                else:
                    channel.send(RING_BYTES, (head,), [self._segment.bytes[at : at + nbytes]])
                sent += nbytes
            now = into.reader_counts()
            if now != counts:
                counts = now
                channel.send(RING_COUNTS, (_COUNTS.pack(*now),))
            self._done[peer] = sent, counts
            if last or self._network.ended(peer):
                return
            bell.sleep(seen, _PAUSE)

    def _land(self, peer: int, kind: int, body: memoryview, receive: Receive) -> None:
        """Applies a frame to this host's copies of the rings."""
        self.use(peer)
        if kind == RING_COUNTS:
            self._out[peer].set_reader_counts(_COUNTS.unpack_from(body), self._refused)
        else:
            ring, (place, nbytes, posted, inline) = self._in[peer], _BYTES.unpack_from(body)
            at = ring.start + place % ring.capacity
            if place != ring.written() or nbytes > ring.capacity - place % ring.capacity:
                raise RuntimeError(f"rank {peer} sent {nbytes} bytes for place {place} of a ring at {ring.written()}")
            if inline:
                self._segment.raw[at : at + nbytes] = body[_BYTES.size : _BYTES.size + nbytes]
            else:
                receive([self._segment.bytes[at : at + nbytes]])
            ring.set_writer_counts(place + nbytes, posted)
        self._bells[self._rank].add()

    def _refused(self) -> None:
        self._segment.longs[self._segment.field(self._rank, REFUSED)] = 1
