"""A store in memory: what the ranks of one host need to make the group of a line-up.

torch's stores serve over sockets, and ask the resolver for the name of every address that connects: seconds where a
name server does not answer. This one is a memory file of the process that makes it. Each change is a line appended to
it, all at once and after all others, as the kernel appends; the values are what the lines come to.
"""

import json
import os
import threading
import time
import weakref
from typing import NamedTuple

from unisono.transport.layout import MEMORY_NAME

__all__ = ["MemoryStore", "StorePlace"]

_PAUSE = 0.001  # s between two looks at what is awaited


class StorePlace(NamedTuple):
    """Where a store lies: a process, its descriptor, the identity of the file."""

    pid: int
    fd: int
    inode: int


class MemoryStore:
    """As `StoreLike` of unisono.transport.segment has it; for all threads of a process."""

    def __init__(self, place: StorePlace | None = None, seconds: float = 60.0) -> None:
        """Makes one, or opens the one at ``place``; `get` waits so many ``seconds``.

        Raises `OSError` if there is none at that place any more.
        """
        if place is None:
            fd = os.memfd_create(f"{MEMORY_NAME}store", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)
            place = StorePlace(os.getpid(), fd, os.fstat(fd).st_ino)
            self._kept = weakref.finalize(self, os.close, fd)
        self.place = place
        self._fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._end = weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_ino != place.inode:
            self._end()
            raise FileNotFoundError(f"process {place.pid} has another file there")
        self._seconds = seconds
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._sums: dict[str, int] = {}
        self._read = 0

    def set(self, key: str, value: str) -> None:
        """Stores a value."""
        with self._lock:
            self._append([key, value])

    def add(self, key: str, value: int) -> int:
        """Adds to a counter; returns the sum."""
        with self._lock:
            self._take(self._append([key, value]))
            return self._sums[key]

    def check(self, keys: list[str]) -> bool:
        """True if all these keys have values."""
        with self._lock:
            self._take(os.fstat(self._fd).st_size)
            return all(key in self._values or key in self._sums for key in keys)

    def get(self, key: str) -> bytes:
        """The value, once there is one. Raises `RuntimeError` if it does not come in time."""
        limit = time.monotonic() + self._seconds
        while not self.check([key]):
            if time.monotonic() > limit:
                raise RuntimeError(f"no rank has set {key} within {self._seconds:.3g} s")
            time.sleep(_PAUSE)
        return self._values[key] if key in self._values else str(self._sums[key]).encode()

    def _append(self, change: list[str | int]) -> int:
        """Adds a line; returns where it ends."""
        os.write(self._fd, json.dumps(change).encode() + b"\n")
        return os.lseek(self._fd, 0, os.SEEK_CUR)

    def _take(self, end: int) -> None:
        """Reads the lines that are whole up to there."""
        found = os.pread(self._fd, max(end - self._read, 0), self._read)
        found = found[: found.rfind(b"\n") + 1]
        self._read += len(found)
        for key, value in map(json.loads, found.splitlines()):
            if isinstance(value, int):
                self._sums[key] = self._sums.get(key, 0) + value
            else:
                self._values[key] = value.encode()
