"""TCP_CORK on sockets of this process, whoever made them: what is written while one is corked leaves in few packets.

Gloo writes each message in two parts, an announcement and the data, and one more for each receive that is posted; each
would be a packet, which costs both hosts more than its bytes. The option needs no privilege and delays nothing: it ends
with the last part.
"""

import ctypes
import socket
from collections.abc import Iterable
from hashlib import sha256

from unisono.transport.keepalive import Connection, open_ones

__all__ = ["NAME", "connection_names", "cork"]

NAME = 8
"""Bytes of a connection's name."""
# PyDLL keeps the interpreter lock: this is shorter than giving the lock away.
_setsockopt = ctypes.PyDLL(None).setsockopt
_SIZE = ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
_SWITCH = {on: ctypes.byref(ctypes.c_int(on)) for on in (True, False)}


def connection_names(connections: Iterable[Connection]) -> dict[bytes, int]:
    """The descriptors of connections, by names that both ends give them; of `NAME` bytes."""
    found = {}
    for fd, copy in open_ones(connections):
        ends = sorted(f"{end[0]} {end[1]}" for end in (copy.getsockname(), copy.getpeername()))
        found[sha256(" ".join(ends).encode()).digest()[:NAME]] = fd
    return found


def cork(fd: int, on: bool) -> None:
    """Corks a connection, or lets what has been written leave; does nothing where it has ended."""
    _setsockopt(fd, socket.IPPROTO_TCP, socket.TCP_CORK, _SWITCH[on], _SIZE)
