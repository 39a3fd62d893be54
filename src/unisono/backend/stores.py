"""The stores over which groups of this process meet, and what a forked child must not do with them.

The process that serves a TCPStore has a thread for it. A forked child has not: where it ended the store, C++ would wait
for that thread, and abort. So the child keeps, to its last moment, every store that it inherits. It closes its copy of
the socket on which the parent listens, for the port is free only when no process has that socket.
"""

import ctypes
import os
import socket
import weakref
from typing import Any

__all__ = ["chain_of", "keep_inherited", "shared_store"]

_met: "weakref.WeakSet[Any]" = weakref.WeakSet()


def shared_store(store: Any) -> Any:
    """The store that all groups share: torch wraps it in a prefix for the group and one for the device."""
    chain = chain_of(store)
    _met.update(chain)
    return chain[min(2, len(chain) - 1)]


def chain_of(store: Any) -> list[Any]:
    """A store and those that it puts a prefix before."""
    chain = [store]
    while (inner := getattr(chain[-1], "underlying_store", None)) is not None:
        chain.append(inner)
    return chain


def keep_inherited() -> None:
    """In a forked child: no inherited store ends, not even when Python does."""
    stores = [store for met in list(_met) for store in chain_of(met)]
    for store in stores:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    ports = {port for store in stores if (port := getattr(store, "port", None))}
    if ports:
        _close_listening(ports)


def _close_listening(ports: set[int]) -> None:
    """Closes this process's sockets that listen on one of these ports."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found = bool(listens) and copy.family in (socket.AF_INET, socket.AF_INET6)
                found = found and copy.getsockname()[1] in ports
        except OSError:  # no socket
            continue
        if found:
            os.close(int(name))
