"""The store that the ranks of a job share, under a prefix, with the remedy in the text of its failures."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from unisono.backend.stores import chain_of
from unisono.errors import PeerLostError
from unisono.transport.keepalive import keep_alive, sockets
from unisono.transport.segment import StoreLike

__all__ = ["JobStore"]


class JobStore:
    """The store that the job's ranks share, under a prefix; its failures have a remedy in their text."""

    def __init__(self, store: StoreLike, prefix: str) -> None:
        self._store: StoreLike | None = store
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        """Stores a value."""
        with self._open() as store:
            store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        with self._open() as store:
            return store.get(f"{self._prefix}/{key}")

    def add(self, key: str, value: int) -> int:
        """Adds to a counter; returns the sum."""
        with self._open() as store:
            return store.add(f"{self._prefix}/{key}", value)

    def check(self, keys: list[str]) -> bool:
        """True if all these keys have values."""
        with self._open() as store:
            return store.check([f"{self._prefix}/{key}" for key in keys])

    @contextmanager
    def _open(self) -> Iterator[StoreLike]:
        if self._store is None:
            raise PeerLostError("this rank has left the group, and with it the job's store")
        try:
            yield self._store
        except RuntimeError as error:
            raise _gone(error) from None

    def under(self, prefix: str) -> "JobStore":
        """The same store under a further prefix."""
        with self._open() as store:
            return JobStore(store, f"{self._prefix}/{prefix}")

    def plain(self, prefix: str) -> Any:
        """The same store under a further prefix, as torch's classes take it."""
        with self._open() as store:
            return PrefixStore(f"{self._prefix}/{prefix}", store)  # type: ignore[arg-type]  # it is one of torch's

    def keep_alive(self, limit: float) -> None:
        """Ends the connection to the store, with an error of the call under way, if that is silent for ``limit`` s."""
        with self._open() as store:
            if port := getattr(chain_of(store)[-1], "port", 0):
                keep_alive(sockets(port), limit)

    def release(self) -> None:
        """Drops the reference to the store, so that it can end, and its server with it."""
        self._store = None


def _gone(error: Exception) -> PeerLostError | OSError:
    """The error of a failed store; `OSError` if this process is at its own limits."""
    words = str(error).partition("\n")[0]
    for number in (errno.EMFILE, errno.ENFILE):
        if os.strerror(number) in words:
            return OSError(number, os.strerror(number))
    return PeerLostError(
        f"the job's store does not answer ({words}): it lives in the process of rank 0 (or of the launcher), which has "
        "left; keep that process until all ranks have finished"
    )
