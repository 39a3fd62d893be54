"""Limits for silent peers: keepalive and TCP_USER_TIMEOUT on sockets of this process, whoever made them.

A host that is cut off closes no connection, so that a wait for it ends after minutes, if at all. Both options are
needed: keepalive for a rank that waits, TCP_USER_TIMEOUT for data that is not acknowledged. Neither needs a privilege.
"""

import os
import socket
from collections.abc import Iterable
from contextlib import closing, suppress

__all__ = ["keep_alive", "shut_down", "sockets"]


def _open(fd: int) -> socket.socket | None:
    """A duplicate of a descriptor, if it is a connected TCP socket."""
    try:
        number = os.dup(fd)
    except OSError:
        return None
    try:
        copy = socket.socket(fileno=number)
    except OSError:  # no socket
        os.close(number)
        return None
    try:
        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
            copy.getpeername()
            return copy
    except OSError:
        pass
    copy.close()
    return None


def sockets(port: int = 0) -> set[int]:
    """The descriptors of this process that are connected TCP sockets; with ``port``, those connected to that port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        if (copy := _open(int(name))) is not None:
            with closing(copy), suppress(OSError):
                if not port or copy.getpeername()[1] == port:
                    found.add(int(name))
    return found


def keep_alive(fds: Iterable[int], limit: float) -> None:
    """Ends connections, each a TCP socket, whose peer does not answer for ``limit`` seconds."""
    idle, interval = max(1, int(limit // 3)), max(1, int(limit // 6))
    count = max(1, round((limit - idle) / interval))
    for fd in fds:
        copy = _open(fd)
        if copy is None:
            continue
        with closing(copy):
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit))


def shut_down(fds: Iterable[int]) -> None:
    """Ends connections, each a TCP socket, whoever holds them; what was sent arrives."""
    for fd in fds:
        copy = _open(fd)
        if copy is not None:
            with closing(copy), suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)
