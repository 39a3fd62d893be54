"""The stores over which groups of this process meet, and what a forked child must not do with them.

The process that serves a TCPStore has a thread for it. A forked child has not: where it ended the store, C++ would wait
for that thread, and abort. So the child keeps, to its last moment, every store that it inherits. It closes its copy of
the socket on which the parent listens, for the port is free only when no process has that socket.
"""

import ctypes
import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from unisono.errors import PeerLostError, first_line
from unisono.transport.keepalive import keep_alive, sockets
from unisono.transport.listening import listeners
from unisono.transport.segment import StoreLike

__all__ = ["JobStore", "announcements", "chain_of", "keep_inherited", "shared_store"]

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
    for found in listeners() if ports else ():
        if found.port in ports:
            os.close(found.fd)


class JobStore:
    """The store that the job's ranks share, under a prefix; its failures have a remedy in their text."""

    def __init__(self, store: StoreLike, prefix: str) -> None:
        self._store: StoreLike | None = store
        self.prefix = prefix
        """Before every key."""
        self.before = ""
        """Words on what was so before, for the error of a store that is lost."""

    def set(self, key: str, value: str) -> None:
        """Stores a value."""
        with self._open() as store:
            store.set(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        with self._open() as store:
            return store.get(f"{self.prefix}/{key}")

    def add(self, key: str, value: int) -> int:
        """Adds to a counter; returns the sum."""
        with self._open() as store:
            return store.add(f"{self.prefix}/{key}", value)

    def check(self, keys: list[str]) -> bool:
        """True if all these keys have values."""
        with self._open() as store:
            return store.check([f"{self.prefix}/{key}" for key in keys])

    @contextmanager
    def _open(self) -> Iterator[StoreLike]:
        if self._store is None:
            raise PeerLostError("this rank has left the group, and with it the job's store")
        try:
            yield self._store
        except RuntimeError as error:
            raise _gone(error, self.before) from None

    def under(self, prefix: str) -> "JobStore":
        """The same store under a further prefix."""
        with self._open() as store:
            return JobStore(store, f"{self.prefix}/{prefix}")

    def plain(self, prefix: str) -> Any:
        """The same store under a further prefix, as torch's classes take it."""
        with self._open() as store:
            return PrefixStore(f"{self.prefix}/{prefix}", store)  # type: ignore[arg-type]  # it is one of torch's

    def host(self) -> str:
        """The name or address under which this process reaches the store, MASTER_ADDR if it is no server."""
        with self._open() as store:
            return str(getattr(chain_of(store)[-1], "host", "") or os.environ.get("MASTER_ADDR", ""))

    def keep_alive(self, limit: float) -> None:
        """Ends the connection to the store, with an error of the call under way, if that is silent for ``limit`` s."""
        with self._open() as store:
            if port := getattr(chain_of(store)[-1], "port", 0):
                keep_alive(sockets(port), limit)

    def release(self) -> None:
        """Drops the reference to the store, so that it can end, and its server with it."""
        self._store = None


def announcements(store: StoreLike, epoch: str, label: str) -> JobStore:
    """Where each global rank announces the group that it makes as ``label``; see `MemberRegistry` for the words."""
    return JobStore(store, f"unisono/{epoch}/named/{label}")


def _gone(error: Exception, before: str) -> PeerLostError | OSError:
    """The error of a failed store, see `JobStore.before`; `OSError` if this process is at its own limits."""
    words = first_line(error)
    for number in (errno.EMFILE, errno.ENFILE):
        if os.strerror(number) in words:
            return OSError(number, os.strerror(number))
    return PeerLostError(
        f"the job's store does not answer ({words}): it lives in the process of rank 0 (or of the launcher), which has "
        f"left{before}; keep that process until all ranks have finished"
    )
