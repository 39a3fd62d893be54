"""The sockets on which this process listens, whoever made them, and how strangers are kept from them.

Gloo's listener takes any connection, reads 8 bytes from it, and keeps it for good if they mean nothing to it: a
stranger who opens enough of them uses up the descriptors of the process, which then aborts. A socket filter that lets
no packet through ends that: once all peers are connected nobody else can connect. It needs no privilege, and
connections that exist do not notice it. Source: Linux, Documentation/networking/filter.rst.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from unisono.transport.keepalive import tcp_socket

__all__ = ["Listener", "listeners", "refuse_all"]

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_RETURN = 0x06  # BPF_RET | BPF_K, of how many bytes of a packet are kept


class Listener(NamedTuple):
    """A listening TCP socket: its descriptor, the inode that tells it from a later one of that number, its port."""

    fd: int
    inode: int
    port: int


def _all() -> Iterator[tuple[Listener, socket.socket]]:
    """Every one, with a duplicate."""
    for name in os.listdir("/proc/self/fd"):
        if (copy := tcp_socket(int(name))) is not None:
            with copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield Listener(int(name), os.fstat(copy.fileno()).st_ino, copy.getsockname()[1]), copy


def listeners() -> set[Listener]:
    """The listening TCP sockets of this process."""
    return {found for found, _ in _all()}


def refuse_all(given: Iterable[Listener]) -> None:
    """Drops every packet for these sockets from now on; where the kernel has no filters nothing changes."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    only = set(given)
    for found, copy in _all():
        if found in only:
            with suppress(OSError):
                copy.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
