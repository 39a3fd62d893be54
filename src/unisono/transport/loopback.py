"""N ranks as threads of one process: to try a schedule, and to test code that runs on a transport.

    def rank_main(transport, scale):
        x = torch.full((4,), float(transport.rank) * scale)
        run_over(schedule, x, transport)
        return x

    results = run_loopback(4, rank_main, 10.0)        # one per rank

A send copies its tensor and is done at once, so it never waits. If every rank that still runs waits for a message that
no rank has sent, all of them raise DeadlockError with the list of waits; if a rank ends, those that wait for it raise
PeerLostError.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from unisono.errors import CollectiveTimeout, DeadlockError, MismatchError, PeerLostError, UnisonoError, UsageError
from unisono.transport.base import Transport, Wait, as_bytes

__all__ = ["Loopback", "loopback", "run_loopback"]

T = TypeVar("T")


class _Exchange:
    """The state that ranks share: messages under way, waits, ranks that have ended."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.moved = threading.Condition()
        self.queues = {(a, b): deque[torch.Tensor]() for a in range(world_size) for b in range(world_size)}
        self.waiting: dict[int, int] = {}
        self.running = set(range(world_size))
        self.timeout = timeout
        self.stuck = ""

    def deadlock(self) -> str:
        """The waits, if no rank that still runs can go on; lock held."""
        if not self.running or any(
            rank not in self.waiting or self.queues[self.waiting[rank], rank] or self.waiting[rank] not in self.running
            for rank in self.running
        ):
            return ""
        waits = ", ".join(f"rank {rank} waits for rank {peer}" for rank, peer in sorted(self.waiting.items()))
        return f"no rank can go on: {waits}; every message that was sent has been received"


class Loopback(Transport):
    """One of the ranks; made by `loopback`."""

    def __init__(self, rank: int, world_size: int, exchange: _Exchange) -> None:
        self.rank, self.world_size = rank, world_size
        self._exchange = exchange
        self._asked = [0] * world_size  # receives posted, by source
        self._taken = [0] * world_size  # receives done

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        """Copies what is sent; see `Transport.post`."""
        exchange = self._exchange
        with exchange.moved:
            for peer, tensor in sends:
                exchange.queues[self.rank, self._peer(peer)].append(tensor.clone())
            exchange.moved.notify_all()
        return [*(_done for _ in sends), *(self._receive(self._peer(peer), tensor) for peer, tensor in receives)]

    def _peer(self, peer: int) -> int:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise UsageError(f"rank {self.rank} of {self.world_size} has no peer {peer}")
        return peer

    def _receive(self, peer: int, tensor: torch.Tensor) -> Wait:
        number = self._asked[peer]
        self._asked[peer] += 1

        def wait() -> None:
            if number != self._taken[peer]:
                raise UsageError(
                    f"rank {self.rank} must wait for messages from rank {peer} in the order it posted them"
                )
            self._taken[peer] += 1
            came = self._next(peer)
            if came.nbytes != tensor.nbytes:
                raise MismatchError(
                    f"rank {self.rank} expects {tensor.nbytes} bytes from rank {peer}, which sent {came.nbytes}"
                )
            as_bytes(tensor).copy_(as_bytes(came))

        return wait

    def _next(self, peer: int) -> torch.Tensor:
        """The next message from a peer, once it is there."""
        exchange, queue = self._exchange, self._exchange.queues[peer, self.rank]
        end = time.monotonic() + exchange.timeout
        with exchange.moved:
            exchange.waiting[self.rank] = peer
            try:
                while not queue:
                    self._check_stuck(peer, end)
                    exchange.moved.wait(min(0.5, max(0.0, end - time.monotonic())))
                return queue.popleft()
            finally:
                del exchange.waiting[self.rank]

    def _check_stuck(self, peer: int, end: float) -> None:
        """Raises if the wait for a peer cannot end; lock held."""
        exchange = self._exchange
        if not exchange.stuck:
            exchange.stuck = exchange.deadlock()
            exchange.moved.notify_all()
        if exchange.stuck:
            raise DeadlockError(exchange.stuck)
        if peer not in exchange.running:
            raise PeerLostError(f"rank {self.rank} waits for a message from rank {peer}, which has ended")
        if time.monotonic() > end:
            raise CollectiveTimeout(f"rank {self.rank} got no message from rank {peer} in {exchange.timeout:g} s")

    def close(self) -> None:
        """Ends this rank: ranks that wait for it raise."""
        with self._exchange.moved:
            self._exchange.running.discard(self.rank)
            self._exchange.moved.notify_all()


def _done() -> None:
    """A loopback send is done when posted."""


@contextmanager
def loopback(world_size: int, timeout: float = 30.0) -> Iterator[list[Loopback]]:
    """One transport per rank, each to be used by a thread of its own; a message is waited for `timeout` seconds."""
    if world_size < 1:
        raise UsageError(f"a loopback has at least 1 rank, got {world_size}")
    exchange = _Exchange(world_size, timeout)
    ranks = [Loopback(rank, world_size, exchange) for rank in range(world_size)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def run_loopback(world_size: int, fn: Callable[..., T], *args: Any, timeout: float = 30.0) -> list[T]:
    """Calls `fn(transport, *args)` as every rank, each in a thread, and returns the results by rank.

    If ranks raise, the first cause is raised: an error that is not merely the loss of another rank, lowest rank first.
    """
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def main(transport: Loopback) -> None:
        try:
            results[transport.rank] = fn(transport, *args)
        except BaseException as error:
            errors[transport.rank] = error
        finally:
            transport.close()

    with loopback(world_size, timeout) as ranks:
        threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank.rank}", daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    causes = sorted(errors.items(), key=lambda item: (isinstance(item[1], PeerLostError), item[0]))
    if causes:
        rank, error = causes[0]
        if not isinstance(error, UnisonoError):
            error.add_note(f"raised by rank {rank} of {world_size}")
        raise error
    return results
