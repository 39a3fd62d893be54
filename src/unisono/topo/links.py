"""What a message between two hosts costs, by pings and a flood over plain TCP. Never imports torch.

A host runs a `link_server`; another calls `measure_link`. The bytes mean nothing and are dropped.
"""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median

from unisono.topo.exchange import close, connect, listen, serve

__all__ = ["LinkCost", "link_server", "measure_link"]

_GREETING = b"unisono\n"
"""What the server sends first: a port that answers otherwise is somebody else's."""
_PING, _FLOOD = b"p", b"f"
_PINGS, _WARM, _PING_NBYTES = 60, 10, 64
_FLOOD_SECONDS, _BLOCK = 0.4, 1 << 18
_LIMIT = 10.0  # s


@dataclass(frozen=True)
class LinkCost:
    """A link in one direction: ``alpha`` seconds for a small message, half a round trip; ``beta`` seconds per byte."""

    alpha: float
    beta: float


@contextmanager
def link_server() -> Iterator[int]:
    """Answers pings and swallows floods on a free port of every interface, whose number it yields."""
    door = listen()
    serve(door, _answer, "unisono answers pings")
    try:
        yield int(door.getsockname()[1])
    finally:
        close(door)


def _answer(channel: socket.socket) -> None:
    with channel, suppress(OSError):
        channel.settimeout(_LIMIT)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.sendall(_GREETING)
        kind = channel.recv(1)
        if kind == _PING:
            while ping := _exactly(channel, _PING_NBYTES):
                channel.sendall(ping)
        elif kind == _FLOOD:
            taken, buffer = 0, bytearray(_BLOCK)
            while nbytes := channel.recv_into(buffer):
                taken += nbytes
            channel.sendall(struct.pack("!Q", taken))


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    """So many bytes; none if the peer has ended."""
    data = b""
    while len(data) < nbytes:
        part = channel.recv(nbytes - len(data))
        if not part:
            return b""
        data += part
    return data


def measure_link(address: str, port: int) -> LinkCost:
    """The cost of the link to a `link_server`; takes about half a second. Raises `OSError` if it does not answer."""
    with _open(address, port, _PING) as channel:
        times = []
        for _ in range(_WARM + _PINGS):
            begun = time.perf_counter()
            channel.sendall(bytes(_PING_NBYTES))
            if not _exactly(channel, _PING_NBYTES):
                raise ConnectionError("the peer has ended")
            times.append(time.perf_counter() - begun)
    with _open(address, port, _FLOOD) as channel:
        block, begun = bytes(_BLOCK), time.perf_counter()
        while time.perf_counter() - begun < _FLOOD_SECONDS:
            channel.sendall(block)
        channel.shutdown(socket.SHUT_WR)
        (taken,) = struct.unpack("!Q", _exactly(channel, 8) or bytes(8))
        seconds = time.perf_counter() - begun
    if not taken:
        raise ConnectionError("the peer has ended")
    return LinkCost(median(times[_WARM:]) / 2, seconds / taken)


def _open(address: str, port: int, kind: bytes) -> socket.socket:
    channel = connect(address, port)
    try:
        channel.settimeout(_LIMIT)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _exactly(channel, len(_GREETING)) != _GREETING:
            raise ConnectionError("another program answers there")
        channel.sendall(kind)
    except BaseException:
        channel.close()
        raise
    return channel
