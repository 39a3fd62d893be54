"""Limits for silent peers: keepalive and TCP_USER_TIMEOUT on sockets of this process, whoever made them.

A host that is cut off closes no connection, so that a wait for it ends after minutes, if at all. Both options are
needed: keepalive for a rank that waits, TCP_USER_TIMEOUT for data that is not acknowledged. Neither needs a privilege.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple

__all__ = ["Connection", "keep_alive", "open_ones", "peer_addresses", "shut_down", "sockets", "tcp_socket"]


class Connection(NamedTuple):
    """A connected TCP socket: once it is closed, its descriptor may be that of another one, of another inode."""

    fd: int
    inode: int


def tcp_socket(fd: int) -> socket.socket | None:
    """A duplicate of a descriptor, if it is a TCP socket."""
    try:
        number = os.dup(fd)
    except OSError:
        return None
    try:
        copy = socket.socket(fileno=number)
    except OSError:  # no socket
        os.close(number)
        return None
    if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
        return copy
    copy.close()
    return None


def _open(fd: int) -> socket.socket | None:
    """A duplicate of a descriptor, if it is a connected TCP socket."""
    if (copy := tcp_socket(fd)) is None:
        return None
    try:
        copy.getpeername()
    except OSError:
        copy.close()
        return None
    return copy


def sockets(port: int = 0) -> set[Connection]:
    """The connected TCP sockets of this process; with ``port``, those connected to that port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        if (copy := _open(int(name))) is not None:
            with closing(copy), suppress(OSError):
                if not port or copy.getpeername()[1] == port:
                    found.add(Connection(int(name), _inode(copy)))
    return found


def _inode(copy: socket.socket) -> int:
    return os.fstat(copy.fileno()).st_ino


def open_ones(connections: Iterable[Connection]) -> Iterator[tuple[int, socket.socket]]:
    """The descriptors of those that are still connected, with duplicates."""
    for each in connections:
        if (copy := _open(each.fd)) is not None:
            with closing(copy):
                if _inode(copy) == each.inode:
                    yield each.fd, copy


def keep_alive(connections: Iterable[Connection], limit: float) -> None:
    """Ends connections whose peer does not answer for ``limit`` seconds."""
    idle, interval = max(1, int(limit // 3)), max(1, int(limit // 6))
    count = max(1, round((limit - idle) / interval))
    for _, copy in open_ones(connections):
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit))


def peer_addresses(connections: Iterable[Connection]) -> set[str]:
    """The addresses of the peers of those that are still connected."""
    return {str(copy.getpeername()[0]) for _, copy in open_ones(connections)}


def shut_down(connections: Iterable[Connection]) -> None:
    """Ends connections, whoever holds them; what was sent arrives."""
    for _, copy in open_ones(connections):
        with suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)
