"""Connections between the ranks of a group on several hosts: frames over an engine, a Gloo group of our own or MPI.

torch's ProcessGroupGloo carries a message once its receive is posted, so a message whose receive is posted late costs a
round trip; and it aborts over a message that is longer than its receive. So a `Channel` between two ranks carries
frames of at most its ``room``, whose receives are posted ahead, for as much; a frame that is shorter leaves the rest of
the buffer as it was, and gives its own length. What does not fit into a frame follows in messages whose sizes the frame
gives. Frames of a channel arrive in the order in which they were sent.

A packet costs more than the bytes in it. So a frame leaves in one (cork.py), with word of the receives that are posted
into the buffers of frames that have come; only where none is sent these are posted by themselves, several at once.
"""

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import cycle, repeat
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from unisono.errors import first_line
from unisono.transport.cork import cork
from unisono.transport.process import OwnThread

__all__ = ["FOREVER", "Channel", "Connected", "Engine", "Mesh", "Receive", "gist"]

_AHEAD, _FEW = 6, 3  # receives of a channel that are posted; how few are left when more are posted without a frame
_HEAD = struct.Struct("<II")  # kind, bytes of the body
FOREVER = timedelta(days=10_000)
_ENDING = 2.0  # s that the threads may take to end
_PAUSE = 0.05  # s
_KEPT = 64  # sends whose buffers are kept at most

Receive = Callable[[Sequence[torch.Tensor]], None]
"""Receives what follows a frame into flat tensors of uint8."""
_Deliver = Callable[[int, int, memoryview, Receive], None]
_Lost = Callable[[int, int, str], None]


class Engine(Protocol):
    """What carries messages between ranks: torch's `ProcessGroupGloo`, or MPI (mpi.py)."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any: ...  # noqa: D102
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any: ...  # noqa: D102


class Connected(NamedTuple):
    """An engine that reaches all ranks of a group; `shut_down` ends every wait in it.

    ``sockets``: by rank, the descriptor of the TCP connection to it, where that is known.
    """

    engine: Engine
    shut_down: Callable[[], None]
    sockets: Mapping[int, int] = {}


class Mesh:
    """The connections of a rank to all of its group; ``lost(peer, tag, words)`` is called when a channel fails."""

    def __init__(self, connected: Connected, lost: _Lost) -> None:
        self.engine: Any = connected.engine
        self.sockets = connected.sockets
        self._shut_down, self.lost = connected.shut_down, lost
        self._channels: list[Channel] = []

    def channel(self, peer: int, tag: int, room: int, deliver: _Deliver) -> "Channel":
        """A channel to and from ``peer``, for bodies of ``room`` bytes.

        ``deliver(peer, kind, body, receive)`` is called for each arriving frame; ``body`` is overwritten after it.
        """
        channel = Channel(self, peer, tag, room, deliver)
        self._channels.append(channel)
        return channel

    def start(self) -> None:
        """Begins to receive."""
        for channel in self._channels:
            channel.start()

    def close(self, deadline: float, data: bool, gone: Container[int]) -> None:
        """Ends the connections once all frames are on their way, or at ``deadline``; then the threads.

        ``data``: what is sent beside frames, too: the peers will receive it. ``gone``: peers that will read nothing.
        """
        flushing = OwnThread(target=self._flush, args=(data, gone), name="unisono flushes", daemon=True)
        flushing.start()
        flushing.join(max(0.0, deadline - time.monotonic()))
        for channel in self._channels:
            channel.end()
        self._shut_down()  # no thread may wait in the engine when Python ends
        threads = [flushing, *(thread for channel in self._channels for thread in channel.threads)]
        deadline = time.monotonic() + _ENDING
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self.disown()
            return
        for channel in self._channels:
            channel.forget()
        self._channels.clear()
        self.lost = _ignore
        self.engine = None  # now, not when Python ends

    def disown(self) -> None:
        """Keeps the engine for good: in a forked child its threads are the parent's, so nothing of it may end there."""
        for channel in self._channels:
            channel.ended = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.engine))

    def _flush(self, data: bool, gone: Container[int]) -> None:
        for channel in self._channels:
            if channel.peer not in gone:
                channel.flush(data)


class _Waiter:
    """A thread that waits for messages, in order, and reports their end."""

    def __init__(self, name: str, failed: Callable[[RuntimeError], None]) -> None:
        self._queue: SimpleQueue[tuple[Sequence[Any], Callable[[], None]] | None] = SimpleQueue()
        self._failed = failed
        self.thread = OwnThread(target=self._run, name=name, daemon=True)
        self._starting = threading.RLock()
        self._started = False

    def add(self, works: Sequence[Any], done: Callable[[], None]) -> None:
        """Calls ``done`` once all of ``works`` are complete."""
        with self._starting:
            if not self._started:
                self._started = True
                self.thread.start()
        self._queue.put((works, done))

    def drain(self) -> None:
        """Returns once all that was added has ended, well or not."""
        if self._started:
            over = threading.Event()
            self._queue.put(((), over.set))
            while self.thread.is_alive() and not over.wait(_PAUSE):
                pass

    def end(self) -> None:
        """Ends the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            works, done = item
            try:
                for work in works:
                    work.wait(FOREVER)
                done()
            except RuntimeError as error:
                self._failed(error)


class Channel:
    """Frames between this rank and one peer, see the module's text. Two tags of the engine, ``2 * tag`` and the next.

    ``room``: bytes of a frame's body at most.
    """

    def __init__(self, mesh: Mesh, peer: int, tag: int, room: int, deliver: _Deliver) -> None:
        self._mesh, self.peer, self._tag, self.room, self._deliver = mesh, peer, 2 * tag, room, deliver
        self._sending = threading.RLock()
        self._sent: deque[Any] = deque()
        self._posted: deque[Any] = deque()
        self._buffers = [torch.empty(_HEAD.size + room, dtype=torch.uint8) for _ in range(_AHEAD)]
        self._free = deque([buffer] for buffer in self._buffers)
        self._socket = mesh.sockets.get(peer, -1)
        self._thread = OwnThread(target=self._run, name=f"unisono from rank {peer}", daemon=True)
        self._leaving = _Waiter(f"unisono data to rank {peer}", self._fail)
        self._coming = _Waiter(f"unisono data from rank {peer}", self._fail)
        self.ended = False

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads that have been started."""
        every = (self._thread, self._leaving.thread, self._coming.thread)
        return [thread for thread in every if thread.ident is not None]

    def end(self) -> None:
        """Drops what arrives from now on."""
        self.ended = True
        self._leaving.end()
        self._coming.end()

    def forget(self) -> None:
        """Drops the messages that were posted, and the callback; no thread waits for them any more."""
        self._deliver = _ignore
        self._posted.clear()
        self._sent.clear()

    def send_data(self, tensors: Sequence[torch.Tensor], done: Callable[[], None]) -> None:
        """Sends tensors that the peer expects (`expect_data`); calls ``done`` once they may be written again."""
        try:
            with self._sending:
                works = [self._mesh.engine.send([tensor], self.peer, self._tag + 1) for tensor in tensors]
        except RuntimeError as error:
            self._fail(error)
        else:
            self._leaving.add(works, done)

    def expect_data(self, tensors: Sequence[torch.Tensor], done: Callable[[], None]) -> None:
        """Posts the receives of what the peer sends by `send_data`; calls ``done`` once all of it is there."""
        try:
            works = [self._mesh.engine.recv([tensor], self.peer, self._tag + 1) for tensor in tensors]
        except RuntimeError as error:
            self._fail(error)
        else:
            self._coming.add(works, done)

    def start(self) -> None:
        """Posts the first receives and begins to wait for them."""
        with self._corked():
            self._post()
        self._thread.start()

    def send(
        self,
        kind: int,
        parts: Sequence[bytes | memoryview],
        more: Sequence[torch.Tensor] = (),
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame, and ``more`` behind it; these tensors must be left alone until the peer has them.

        ``parts``: its body, one after the other. ``gone``: called once the frame is on its way, by a thread.

        Nothing is waited for but frames sent long before. A peer that is lost is reported, not raised.
        """
        if self.ended:
            return
        head = _HEAD.pack(kind, sum(map(len, parts)))
        frame = torch.frombuffer(bytearray().join((head, *parts)), dtype=torch.uint8)
        engine = self._mesh.engine
        try:
            with self._corked():
                sent = engine.send([frame], self.peer, self._tag)
                if gone is None:
                    self._sent.append((sent, frame))
                else:  # a send can be waited for once
                    self._leaving.add([sent], partial(_after, frame, gone))
                for tensor in more:
                    self._sent.append((engine.send([tensor], self.peer, self._tag + 1), tensor))
                self._post()
                old = [self._sent.popleft()[0] for _ in range(len(self._sent) - _KEPT)]
            for work in old:
                work.wait(FOREVER)
        except RuntimeError as error:
            self._fail(error)

    def flush(self, data: bool) -> None:
        """Returns once all frames so far, and the ``data`` beside them, are on their way.

        Not those of later: a send to a peer that has just closed its connection may neither end nor fail in Gloo.
        """
        with self._sending:
            sent, self._sent = self._sent, deque()
        try:
            while sent:
                sent.popleft()[0].wait(FOREVER)
        except RuntimeError as error:
            self._fail(error)
        if data:
            self._leaving.drain()

    def _run(self) -> None:
        buffers = cycle([(buffer, buffer.numpy().data) for buffer in self._buffers])
        try:
            while not self.ended:
                if not self._posted:
                    raise RuntimeError("Connection closed by peer")
                self._posted.popleft().wait(FOREVER)
                buffer, view = next(buffers)
                kind, nbytes = _HEAD.unpack_from(view)
                if not self.ended:
                    self._deliver(self.peer, kind, view[_HEAD.size : _HEAD.size + nbytes], self._receive)
                self._free.append([buffer])
                if len(self._posted) <= _FEW:
                    with self._corked():
                        self._post()
        except RuntimeError as error:
            self._fail(error)

    def _post(self) -> None:
        """Posts receives into all buffers that are free, in one statement: no signal's handler may come in between.

        Where the peer has gone, none: what has arrived before is delivered first. `_corked` is held.
        """
        recv, free = self._mesh.engine.recv, iter(self._free.popleft, None)
        with suppress(IndexError, RuntimeError):
            self._posted.extend(map(recv, free, repeat(self.peer), repeat(self._tag)))

    @contextmanager
    def _corked(self) -> Iterator[None]:
        """Lets one thread send and post at a time; all that it writes leaves together."""
        with self._sending:
            try:
                cork(self._socket, True)
                yield
            finally:
                cork(self._socket, False)

    def _receive(self, tensors: Sequence[torch.Tensor]) -> None:
        works = [self._mesh.engine.recv([tensor], self.peer, self._tag + 1) for tensor in tensors]
        for work in works:
            work.wait(FOREVER)

    def _fail(self, error: RuntimeError) -> None:
        self._socket = -1
        if not self.ended:
            self._mesh.lost(self.peer, self._tag // 2, gist(error))


def _after(frame: torch.Tensor, then: Callable[[], None]) -> None:
    """Keeps a frame until it has been sent."""
    then()


def _ignore(*_: Any) -> None:
    """Takes the place of the callbacks of a mesh that is closed: they hold the group's memory."""


def gist(error: BaseException) -> str:
    """The gist of an error of Gloo: without the place in its source and the advice at its end."""
    text = first_line(error)
    return text.rpartition("] ")[2].partition(". This is typically")[0] if text.startswith("[") else text
