"""Meetings: the address at which senders and receivers find each other.

    tcp://host:port     the sender's rank 0 listens there; port 0 picks one
    file:///path        a file of mode 0600 says where it listens, and has a word that receivers must give
    a store             of torch.distributed, has the same under one key

What a process left there is believed only while that process lives: the note has its pid, start time and the kernel's
boot. So after any end of a sender the address serves again.
"""

import hmac
import json
import os
import secrets
import select
import socket
import stat
import time
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from unisono.errors import UsageError, first_line
from unisono.transport.host import Host
from unisono.weights.wire import Who, fork_safe

__all__ = ["KEY", "Listener", "Note", "Place", "connect", "pause", "place_at"]

KEY = "unisono.weights"
_FORMS = "expected tcp://host:port, file:///path, or a torch.distributed store"
_CONNECTING = 1.0  # s


class Note(NamedTuple):
    """What a sender leaves at a file or in a store: where it listens, the word to give, its process."""

    endpoints: list[tuple[str, int]]
    word: str
    who: Who | None
    closed: bool = False

    def to_text(self) -> str:
        """As it is kept."""
        return json.dumps({"unisono": "weights", **self._asdict()})

    @classmethod
    def from_text(cls, text: str) -> "Note":
        """What `to_text` gave. Raises `ValueError` if it is something else."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("unisono") != "weights":
            raise ValueError("no note of a meeting")
        try:
            endpoints = [(str(host), int(port)) for host, port in found["endpoints"]]
            return cls(endpoints, str(found["word"]), Who.of(found["who"]), bool(found["closed"]))
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from None


class Place(Protocol):
    """An address, for senders that publish a note there, and for receivers that look for one."""

    address: str

    def bind(self) -> tuple[str, int]: ...  # noqa: D102  # where to listen
    def publish(self, note: Note) -> None: ...  # noqa: D102
    def find(self) -> Note | None: ...  # noqa: D102  # also a dead sender's


class _Tcp:
    """The sender listens at the address itself."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port is None or any((parts.path.strip("/"), parts.query, parts.fragment, parts.username)):
            raise UsageError(f"address {address!r}: expected tcp://host:port, such as tcp://127.0.0.1:29600")
        self.host, self.port = host, port

    def bind(self) -> tuple[str, int]:
        return self.host, self.port

    def publish(self, note: Note) -> None:
        """Nothing to do: it listens there."""
        if not note.closed and not self.port:
            self.port = note.endpoints[0][1]
            shown = f"[{self.host}]" if ":" in self.host else self.host
            self.address = f"tcp://{shown}:{self.port}"

    def find(self) -> Note | None:
        if not self.port:
            raise UsageError(f"address {self.address!r}: port 0 is for the sender; receivers need its `address`")
        return Note([(self.host, self.port)], "", None)


class _Noted:
    """An address that holds a note: a file or a store."""

    address: str

    def bind(self) -> tuple[str, int]:
        """Any port of every interface; raises `UsageError` if a sender that lives has its note there."""
        found = self.find()
        if found is not None and not found.closed and found.who is not None and not found.who.gone:
            sock = connect(found)
            if sock is not None:
                sock.close()
                raise UsageError(f"{self.address} is in use by the sender of {found.who}: close that, or use another")
        return "", 0

    def find(self) -> Note | None:
        raise NotImplementedError


class _File(_Noted):
    """A note in a file, replaced as a whole."""

    def __init__(self, address: str) -> None:
        self.address = address
        host, slash, path = address.removeprefix("file://").partition("/")
        self.path = unquote(slash + path)
        if host not in ("", "localhost") or not self.path or self.path.endswith("/") or "\0" in self.path:
            raise UsageError(f"address {address!r}: expected file:///path, with the path of a file")

    def publish(self, note: Note) -> None:
        fresh = f"{self.path}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            os.makedirs(os.path.dirname(self.path) or "/", exist_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(note.to_text())
            os.replace(fresh, self.path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(fresh)
            raise UsageError(f"{self.address} can not be written: {error.strerror}") from None

    def find(self) -> Note | None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{self.address} can not be read: {error.strerror}{_owner(self.path)}") from None
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise UsageError(f"{self.address} is no file: give the path of one, which may be missing")
            if about.st_uid not in (os.geteuid(), 0):
                raise UsageError(f"{self.address} is another user's{_owner(self.path)}: use a file of your own")
            text = os.read(fd, 1 << 16)
        finally:
            os.close(fd)
        if not text:
            return None
        try:
            return Note.from_text(text.decode())
        except ValueError:
            raise UsageError(f"{self.address} is not a meeting file: remove it, or use another path") from None


def _owner(path: str) -> str:
    try:
        return f" (uid {os.stat(path).st_uid} owns it, this process is uid {os.geteuid()})"
    except OSError:
        return ""


class _Store(_Noted):
    """A note under a key of a store."""

    def __init__(self, store: Any) -> None:
        self.store, self.address = store, f"the store {type(store).__name__}"

    def publish(self, note: Note) -> None:
        try:
            self.store.set(KEY, note.to_text())
        except RuntimeError as error:
            if not note.closed:
                raise UsageError(f"{self.address} does not answer: {first_line(error)}") from None

    def find(self) -> Note | None:
        try:
            text = self.store.get(KEY) if self.store.check([KEY]) else b""
        except RuntimeError as error:
            raise UsageError(f"{self.address} does not answer: {first_line(error)}") from None
        if not text:
            return None
        try:
            return Note.from_text(text.decode())
        except ValueError:
            raise UsageError(f"{self.address} holds something else under {KEY!r}: put a PrefixStore before") from None


def place_at(address: Any) -> Place:
    """The meeting place at an address. Raises `UsageError` for one of another form."""
    if isinstance(address, str):
        if address.startswith("tcp://"):
            return _Tcp(address)
        if address.startswith("file://"):
            return _File(address)
    elif not isinstance(address, type) and all(hasattr(address, name) for name in ("set", "get", "check")):
        return _Store(address)
    raise UsageError(f"unknown address {address!r}: {_FORMS}")


class Listener:
    """The socket at which a sender's rank 0 takes the connections of all others, and its note."""

    def __init__(self, place: Place) -> None:
        """Listens and publishes. Raises `UsageError` if the address is in use or can not be had."""
        host, port = place.bind()
        self._place = place
        try:
            self.socket = _listening(host, port)
        except OSError as error:
            raise UsageError(f"{place.address} can not be listened at: {error.strerror or error}") from None
        self.socket.setblocking(False)
        fork_safe(self.socket)
        port = self.socket.getsockname()[1]
        noted = isinstance(place, _Noted)
        names = ["127.0.0.1", *_own_addresses()] if noted else [host]
        self.note = Note([(name, port) for name in names], secrets.token_hex(16) if noted else "", Who.mine())
        try:
            place.publish(self.note)
        except BaseException:
            self.socket.close()
            raise
        self.address = place.address

    def knows(self, word: str) -> bool:
        """True for the word of the note, which only those who may read that know."""
        return hmac.compare_digest(word.encode(), self.note.word.encode())

    def close(self) -> None:
        """Stops listening; the note says who was there."""
        self.socket.close()
        with suppress(UsageError, OSError):
            found = self._place.find()
            if found is not None and found.word == self.note.word:
                self._place.publish(self.note._replace(closed=True))


def _listening(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=512)


def _own_addresses() -> list[str]:
    """The addresses of this machine that others may reach, as far as its name says."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in found if not str(info[4][0]).startswith("127.")))


def connect(note: Note) -> socket.socket | None:
    """A connection to a sender; None if it does not listen (any more)."""
    endpoints = note.endpoints
    if note.who is not None and Host.from_text(note.who.host).boot != Host.mine().boot:
        endpoints = [end for end in endpoints if end[0] != "127.0.0.1"]
    for host, port in endpoints:
        try:
            return socket.create_connection((host, port), timeout=_CONNECTING)
        except OSError:
            continue
    return None


def pause(seconds: float, *wakers: int) -> None:
    """Sleeps, unless a descriptor becomes readable."""
    poll = select.poll()
    for waker in wakers:
        poll.register(waker, select.POLLIN)
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        if poll.poll(left * 1e3):
            return
