"""Messages between the ranks of a meeting: JSON and, where needed, bytes behind it. Nothing is pickled.

A message is a header (a mark, two lengths), a JSON object with its ``kind``, then data. What does not begin with the
mark, or is longer than a stranger may send, ends the connection. Connections never block: what the system does not take
at once is kept and sent when it does.
"""

import json
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.transport.host import Host
from unisono.transport.process import Identity, alive, fate, start_time, stopped

__all__ = ["HELLO_NBYTES", "PROTOCOL", "Broken", "Connection", "Message", "Who", "fork_safe"]

_HEADER = struct.Struct("<8sII")
_MARK = b"unisono1"
PROTOCOL = 2
"""Of the conversation; ranks of another one are refused."""
HELLO_NBYTES = 16 << 10
"""A message of a rank that is not yet known may be this long."""
_MOST = 1 << 30
_CHUNK = 1 << 18

_open: "weakref.WeakSet[Any]" = weakref.WeakSet()


def fork_safe(thing: Any) -> None:
    """Closes ``thing`` (a socket) in forked children: a connection must end with the process that made it."""
    _open.add(thing)


def _close_in_child() -> None:
    for thing in list(_open):
        with suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_in_child)


class Broken(Exception):
    """A connection has ended, or is none of unisono's."""


@dataclass(frozen=True)
class Message:
    """One message."""

    kind: str
    fields: dict[str, Any]
    data: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or ``default``."""
        return self.fields.get(name, default)


class Connection:
    """One end of a stream of messages."""

    def __init__(self, sock: socket.socket, limit: int = _MOST) -> None:
        self._socket, self._limit = sock, limit
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
        self._received = bytearray()
        self._held = b""
        self._queued: deque[memoryview] = deque()
        self._messages: deque[Message] = deque()
        fork_safe(sock)

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._socket.fileno()

    @property
    def host(self) -> str:
        """The address of the other end."""
        return str(self._socket.getpeername()[0])

    @property
    def queued(self) -> bool:
        """True if something waits to be sent."""
        return bool(self._queued)

    def trust(self) -> None:
        """The other end is known: its messages may be long."""
        self._limit = _MOST

    def send(self, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Queues a message and sends what the system takes. Raises `Broken`."""
        message = _written(kind, data, fields)
        self._queued.append(memoryview(self._held + message if self._held else message))
        self._held = b""
        self.flush()

    def hold_back(self, kind: str, **fields: Any) -> None:
        """Keeps a message for the next that is sent, with which it goes: the other end wakes up once for both."""
        self._held += _written(kind, b"", fields)

    def flush(self) -> None:
        """Sends what the system takes now. Raises `Broken`."""
        while self._queued:
            try:
                sent = self._socket.send(self._queued[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Broken(str(error)) from None
            if sent == len(self._queued[0]):
                self._queued.popleft()
            else:
                self._queued[0] = self._queued[0][sent:]

    def receive(self) -> Message | None:
        """The next message that has arrived, if one has. Raises `Broken` once all before the end have been given."""
        if not self._messages:
            self._read()
        return self._messages.popleft() if self._messages else None

    def unread(self, message: Message) -> None:
        """The message will be received again, as the next."""
        self._messages.appendleft(message)

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                data = b""
                break
            except OSError as error:
                self._parse()
                if self._messages:
                    return
                raise Broken(str(error)) from None
            if not data:
                self._parse()
                if self._messages:
                    return
                raise Broken("closed by the other side")
            self._received += data
            if len(data) < _CHUNK:
                break
            self._parse()
        self._parse()

    def _parse(self) -> None:
        """Takes the whole messages out of what has been received."""
        while len(self._received) >= _HEADER.size:
            mark, text, data = _HEADER.unpack_from(self._received)
            if mark != _MARK or text + data > self._limit:
                raise Broken("not a message of unisono")
            end = _HEADER.size + text + data
            if len(self._received) < end:
                return
            try:
                fields = json.loads(self._received[_HEADER.size : _HEADER.size + text])
                kind = fields.pop("kind")
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                raise Broken("not a message of unisono") from None
            self._messages.append(Message(str(kind), fields, bytes(self._received[_HEADER.size + text : end])))
            del self._received[:end]
            if self._limit < _MOST:
                return  # who that is decides how long the next may be
        if self._received and not _MARK.startswith(bytes(self._received[:8])):
            raise Broken("not a message of unisono")

    def wait(self, deadline: float, *wakers: int) -> Message | None:
        """The next message, or None at ``deadline`` (``time.monotonic``) or once a descriptor of ``wakers`` is ready.

        Raises `Broken`.
        """
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._queued else 0))
        for waker in wakers:
            poll.register(waker, select.POLLIN)
        while (message := self.receive()) is None:
            if self._queued:
                self.flush()
            poll.modify(self.fileno(), select.POLLIN | (select.POLLOUT if self._queued else 0))
            left = deadline - time.monotonic()
            ready = poll.poll(min(max(left, 0.0), 3600.0) * 1e3)
            if any(descriptor in wakers for descriptor, _ in ready) or (not ready and left <= 0):
                return self.receive()
        return message

    def close(self) -> None:
        """Sends what is still queued, if the system takes it, and ends the connection."""
        with suppress(Broken):
            self.flush()
        self._socket.close()


def _written(kind: str, data: bytes, fields: dict[str, Any]) -> bytes:
    text = json.dumps({"kind": kind, **fields}).encode()
    return _HEADER.pack(_MARK, len(text), len(data)) + text + data


class Who(NamedTuple):
    """A process as it describes itself: pid, start time, `Host` as text, name of its machine."""

    pid: int
    started: int
    host: str
    hostname: str

    @classmethod
    def mine(cls) -> "Who":
        """This process."""
        me = Identity.mine()
        return cls(me.pid, me.started, Host.mine().to_text(), socket.gethostname())

    @classmethod
    def of(cls, found: Any) -> "Who":
        """From JSON. Raises `ValueError` if it is no such thing."""
        try:
            pid, started, host, hostname = found
            who = cls(int(pid), int(started), str(host), str(hostname)[:255])
            Host.from_text(who.host)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return who

    @property
    def identity(self) -> Identity:
        """Its process."""
        return Identity(self.pid, self.started)

    @property
    def visible(self) -> bool:
        """True if this process can look it up by its pid."""
        return Host.mine().sees(Host.from_text(self.host))

    @property
    def gone(self) -> bool:
        """True if it certainly does not live: it ended, or its machine was started again."""
        there, here = Host.from_text(self.host), Host.mine()
        if there.boot != here.boot:
            return self.hostname == socket.gethostname()
        return self.visible and not alive(self.identity)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname}"

    def end(self) -> str:
        """How it ended, as far as can be known here; waits a moment for a process that is about to end."""
        if not self.visible:
            return "its connection ended"
        limit = time.monotonic() + 0.2
        while alive(self.identity) and time.monotonic() < limit:
            time.sleep(0.005)
        if alive(self.identity):
            return "it closed the connection and lives"
        return f"it is dead: {fate(self.identity)}"

    def activity(self) -> str:
        """What it does instead of answering, as far as can be seen from here."""
        if not self.visible:
            return "it does not answer"
        if not start_time(self.pid) or not alive(self.identity):
            return f"it is dead: {fate(self.identity)}"
        return "it is stopped (by a signal or in a debugger)" if stopped(self.identity) else "it runs"
