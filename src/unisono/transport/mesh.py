"""Connections between the ranks of a group on several hosts: frames of one fixed size over a Gloo group of our own.

torch's ProcessGroupGloo carries a message once its receive is posted, so a message whose receive is posted late costs a
round trip; and it survives no message whose size differs from its receive's. So a `Channel` between two ranks carries
frames of one size, whose receives are posted ahead; what does not fit into a frame follows in messages whose sizes the
frame gives. Frames of a channel arrive in the order in which they were sent.
"""

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from unisono.transport.handshake import FOREVER, Connected, gist
from unisono.transport.keepalive import keep_alive, shut_down
from unisono.transport.process import OwnThread

__all__ = ["Channel", "Mesh", "Receive"]

_AHEAD = 3  # receives of a channel that are posted
_HEAD = struct.Struct("<II")  # kind, bytes of the body
_ENDING = 2.0  # s that the threads may take to end
_KEPT = 64  # sends whose buffers are kept at most

Receive = Callable[[Sequence[torch.Tensor]], None]
"""Receives what follows a frame into flat tensors of uint8."""
_Deliver = Callable[[int, int, memoryview, Receive], None]
_Lost = Callable[[int, int, str], None]


class Mesh:
    """The connections of a rank to all ranks of its group.

    ``limit``: seconds after which a host that does not answer is lost. ``lost(peer, tag, words)`` is called when a
    channel fails.
    """

    def __init__(self, connected: Connected, limit: float, frame_nbytes: int, lost: _Lost) -> None:
        self.frame_nbytes, self.lost = frame_nbytes, lost
        self.room = frame_nbytes - _HEAD.size
        self.gloo: Any = connected.gloo
        self._sockets = connected.sockets
        keep_alive(self._sockets, limit)
        self._channels: list[Channel] = []

    def channel(self, peer: int, tag: int, deliver: _Deliver) -> "Channel":
        """A channel to and from ``peer``; ``deliver(peer, kind, body, receive)`` is called for each arriving frame."""
        channel = Channel(self, peer, tag, deliver)
        self._channels.append(channel)
        return channel

    def start(self) -> None:
        """Begins to receive."""
        for channel in self._channels:
            channel.start()

    def close(self, deadline: float) -> None:
        """Ends the connections once all that was sent is on its way, or at ``deadline``; then the threads."""
        flushing = OwnThread(target=self._flush, name="unisono flushes", daemon=True)
        flushing.start()
        flushing.join(max(0.0, deadline - time.monotonic()))
        for channel in self._channels:
            channel.end()
        shut_down(self._sockets)  # no thread may wait in Gloo when Python ends
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
        self.gloo = None  # now, not when Python ends

    def disown(self) -> None:
        """Keeps Gloo for good: in a forked child its threads are the parent's, so nothing of it may end there."""
        for channel in self._channels:
            channel.ended = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.gloo))

    def _flush(self) -> None:
        for channel in self._channels:
            channel.flush()


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

    def afterwards(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once all that was added has ended, well or not."""
        if self._started:
            self._queue.put(((), then))
        else:
            then()

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
    """Frames between this rank and one peer, see the module's text. Two tags of Gloo, ``2 * tag`` and the next."""

    def __init__(self, mesh: Mesh, peer: int, tag: int, deliver: _Deliver) -> None:
        self._mesh, self.peer, self._tag, self._deliver = mesh, peer, 2 * tag, deliver
        self._sending = threading.RLock()
        self._sent: deque[Any] = deque()
        self._posted: deque[Any] = deque()
        self._buffers = [torch.zeros(mesh.frame_nbytes, dtype=torch.uint8) for _ in range(_AHEAD)]
        self._thread = OwnThread(target=self._run, name=f"unisono from rank {peer}", daemon=True)
        self._leaving = _Waiter(f"unisono data to rank {peer}", self._fail)
        self._coming = _Waiter(f"unisono data from rank {peer}", self._fail)
        self.ended = self.drained = False
        """``drained``: the connection has failed and every frame that came before has been delivered."""

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
                works = [self._mesh.gloo.send([tensor], self.peer, self._tag + 1) for tensor in tensors]
        except RuntimeError as error:
            self._fail(error)
        else:
            self._leaving.add(works, done)

    def expect_data(self, tensors: Sequence[torch.Tensor], done: Callable[[], None]) -> None:
        """Posts the receives of what the peer sends by `send_data`; calls ``done`` once all of it is there."""
        try:
            works = [self._mesh.gloo.recv([tensor], self.peer, self._tag + 1) for tensor in tensors]
        except RuntimeError as error:
            self._fail(error)
        else:
            self._coming.add(works, done)

    def after_data(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once all data that is expected has arrived or failed."""
        self._coming.afterwards(then)

    def start(self) -> None:
        """Posts the first receives and begins to wait for them."""
        gloo = self._mesh.gloo
        self._posted.extend(gloo.recv([buffer], self.peer, self._tag) for buffer in self._buffers)
        self._thread.start()

    def send(self, kind: int, body: bytes | bytearray | memoryview, more: Sequence[torch.Tensor] = ()) -> None:
        """Sends a frame, and ``more`` behind it; these tensors must be left alone until the peer has them.

        Nothing is waited for but frames sent long before. A peer that is lost is reported, not raised.
        """
        if self.ended:
            return
        frame = torch.zeros(self._mesh.frame_nbytes, dtype=torch.uint8)
        view: Any = frame.numpy().data
        _HEAD.pack_into(view, 0, kind, len(body))
        view[_HEAD.size : _HEAD.size + len(body)] = body
        gloo = self._mesh.gloo
        try:
            with self._sending:
                self._sent.append((gloo.send([frame], self.peer, self._tag), frame))
                for tensor in more:
                    self._sent.append((gloo.send([tensor], self.peer, self._tag + 1), tensor))
                old = [self._sent.popleft()[0] for _ in range(len(self._sent) - _KEPT)]
            for work in old:
                work.wait(FOREVER)
        except RuntimeError as error:
            self._fail(error)

    def flush(self) -> None:
        """Returns once all that was sent is on its way."""
        try:
            with self._sending:
                while self._sent:
                    self._sent.popleft()[0].wait(FOREVER)
        except RuntimeError as error:
            self._fail(error)

    def _run(self) -> None:
        gloo, k = self._mesh.gloo, 0
        try:
            while not self.ended:
                if not self._posted:
                    raise RuntimeError("Connection closed by peer")
                self._posted.popleft().wait(FOREVER)
                buffer = self._buffers[k]
                view = memoryview(buffer.numpy().tobytes())
                with suppress(RuntimeError):  # the peer has gone: what has arrived before is delivered first
                    self._posted.append(gloo.recv([buffer], self.peer, self._tag))
                k = (k + 1) % _AHEAD
                kind, nbytes = _HEAD.unpack_from(view)
                if not self.ended:
                    self._deliver(self.peer, kind, view[_HEAD.size : _HEAD.size + nbytes], self._receive)
        except RuntimeError as error:
            self.drained = True
            self._fail(error)

    def _receive(self, tensors: Sequence[torch.Tensor]) -> None:
        works = [self._mesh.gloo.recv([tensor], self.peer, self._tag + 1) for tensor in tensors]
        for work in works:
            work.wait(FOREVER)

    def _fail(self, error: RuntimeError) -> None:
        if not self.ended:
            self._mesh.lost(self.peer, self._tag // 2, gist(error))


def _ignore(*_: Any) -> None:
    """Takes the place of the callbacks of a mesh that is closed: they hold the group's memory."""
