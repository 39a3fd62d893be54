"""Ranks as processes of one host, over rings of shared memory (ring.py): what `run` needs of a wire, and no more.

    transport = SharedMemory(store, rank, world_size)     # any torch.distributed.Store; all ranks
    run(schedule, x, transport)

Bytes flow from a send into the ring and from the ring into the receive that was posted for them, without envelopes,
for both ends know the sizes. Whoever waits moves whatever can move, its own sends included, and sleeps on its bell in
the kernel when nothing can.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from unisono.errors import CollectiveTimeout, PeerLostError, UsageError
from unisono.transport import futex
from unisono.transport.base import Transport, Wait, as_bytes
from unisono.transport.process import Identity, alive, fate
from unisono.transport.ring import Ring
from unisono.transport.segment import ABSENT, JOINED, LEFT, PID, STATE, StoreLike, attach, create

__all__ = ["SharedMemory"]

_PIECE = 128 * 1024  # bytes moved before the peer is told
_SPINS, _YIELDS = 20, 100
_SLICE = 0.05  # s: how long anybody sleeps before looking around


class _Stranger:
    """Nothing is known of the first rank before it comes."""

    def check(self) -> None:
        """Nothing to say."""

    def late(self) -> CollectiveTimeout:
        return CollectiveTimeout(
            "rank 0 made no shared memory within the timeout. Are all ranks started, and meet at the same store?"
        )


class _Message:
    """Bytes under way to or from a peer; `moved` of them have passed this end."""

    __slots__ = ("data", "moved", "peer")

    def __init__(self, peer: int, tensor: torch.Tensor) -> None:
        self.peer, self.data, self.moved = peer, as_bytes(tensor), 0

    @property
    def done(self) -> bool:
        return self.moved == self.data.numel()


class SharedMemory(Transport):
    """One rank, connected to all others of `world_size` that meet at `store`.

    `store` is any torch.distributed.Store that all ranks share, and serves one group: wrap it in a PrefixStore to use
    it again. Made once all ranks have come. `timeout`: seconds that a message, or another rank's coming, is waited for.
    Raises CollectiveTimeout naming the ranks that do not come, UsageError on another host.
    """

    def __init__(self, store: StoreLike, rank: int, world_size: int, timeout: float = 30.0) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"there is no rank {rank} among {world_size}")
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        fd, deadline = -1, time.monotonic() + timeout
        if rank == 0:
            segment, fd = create(store, world_size, "transport")
        else:
            segment = attach(store, rank, world_size, deadline, _Stranger())
        self._segment, mine, at = segment, Identity.mine(), segment.field(rank, PID)
        segment.longs[at], segment.longs[at + 1], segment.longs[at + 2] = mine.pid, mine.started, JOINED
        bells, peers = segment.layout.bells, range(world_size)
        self._bells = [futex.Counter(segment.words, (bells + 64 * p) // 4, segment.address) for p in peers]
        self._out, self._in = [Ring(segment, rank, p) for p in peers], [Ring(segment, p, rank) for p in peers]
        self._sends: list[deque[_Message]] = [deque() for _ in peers]
        self._receives: list[deque[_Message]] = [deque() for _ in peers]
        try:
            self._meet(deadline)
        finally:
            if fd >= 0:
                os.close(fd)

    def _meet(self, deadline: float) -> None:
        while missing := [p for p in range(self.world_size) if self._segment.state(p) == ABSENT]:
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"rank {self.rank} waited {self.timeout:g} s for rank{'s' * (len(missing) > 1)} "
                    f"{', '.join(map(str, missing))} of {self.world_size} to come"
                )
            time.sleep(0.001)

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        """Puts into the rings what fits; see `Transport.post`."""
        leaving = [_Message(self._checked(peer), tensor) for peer, tensor in sends]
        coming = [_Message(self._checked(peer), tensor) for peer, tensor in receives]
        for message in leaving:
            self._sends[message.peer].append(message)
        for message in coming:
            self._receives[message.peer].append(message)
        self._carry()
        return [
            *(partial(self._wait, message, "to") for message in leaving),
            *(partial(self._wait, message, "from") for message in coming),
        ]

    def close(self) -> None:
        """Leaves: peers that wait for this rank are told."""
        segment = self._segment
        segment.longs[segment.field(self.rank, STATE)] = LEFT
        for bell in self._bells:
            bell.add()

    def _checked(self, peer: int) -> int:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise UsageError(f"rank {self.rank} of {self.world_size} has no peer {peer}")
        return peer

    def _wait(self, message: _Message, way: str) -> None:
        limit = time.perf_counter() + futex.LINGER
        for attempt in range(_SPINS + _YIELDS):
            if message.done:
                return
            self._carry()
            if attempt >= _SPINS and (time.perf_counter() > limit or not futex.give_way()):
                break
        bell, now = self._bells[self.rank], time.monotonic()
        end, look = now + self.timeout, now
        while True:
            heard = bell.value()
            self._carry()
            if message.done:
                return
            now = time.monotonic()
            if now >= look:
                self._look_around(message, way, now > end)
                look = now + _SLICE
            bell.sleep(heard, _SLICE)

    def _look_around(self, message: _Message, way: str, late: bool) -> None:
        """Raises if the peer is gone or the time is up."""
        peer, segment = message.peer, self._segment
        who, state = segment.identity(peer), segment.state(peer)
        what = f"rank {self.rank}: {message.moved} of {message.data.numel()} bytes {way} rank {peer} have passed"
        if state == LEFT and (way == "to" or not self._in[peer].there()):
            raise PeerLostError(f"{what}, and rank {peer} has left")
        if state != LEFT and not alive(who):
            raise PeerLostError(f"{what}, and rank {peer} (pid {who.pid}) is dead: {fate(who)}")
        if late:
            raise CollectiveTimeout(f"{what} in {self.timeout:g} s")

    def _carry(self) -> None:
        """Moves whatever can move now."""
        for peer in range(self.world_size):
            for queue, step in ((self._sends[peer], self._push), (self._receives[peer], self._pull)):
                while queue and step(queue[0], peer):
                    queue.popleft()

    def _push(self, message: _Message, peer: int) -> bool:
        """Moves what fits of a message into the ring; whether all of it is in."""
        ring = self._out[peer]
        while not message.done and (room := ring.room()) > 0:
            at, left = ring.write_place(), message.data.numel() - message.moved
            part = min(left, room, ring.capacity - at, _PIECE)
            ring.data[at : at + part].copy_(message.data[message.moved : message.moved + part])
            message.moved += part
            ring.written(part)
            self._bells[peer].add()
        return message.done

    def _pull(self, message: _Message, peer: int) -> bool:
        """Takes what is there of a message; whether all of it has come."""
        ring = self._in[peer]
        while not message.done and (there := ring.there()) > 0:
            at, left = ring.read_place(), message.data.numel() - message.moved
            part = min(left, there, ring.capacity - at, _PIECE)
            message.data[message.moved : message.moved + part].copy_(ring.data[at : at + part])
            message.moved += part
            ring.taken(part)
            self._bells[peer].add()
        return message.done
