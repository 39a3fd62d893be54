"""A store in memory that processes of one host share: no process serves it, and no resolver is asked.

torch's stores serve over sockets, by a process that may be stopped or leave, and ask the resolver for the name of every
address that connects: seconds where a name server does not answer.

A memory file with a log: `set` and `add` append one line of JSON in one write, and the order in which the kernel takes
them (O_APPEND) is the order for all. Every process keeps what it has read. A line begins with a line's end as well, so
that of a process which was killed while it wrote nothing but its own line is lost.
"""

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Self

from unisono.errors import CollectiveTimeout, PeerLostError
from unisono.transport.layout import MEMORY_NAME

__all__ = ["MemoryStore"]

_PAUSE = 0.001  # s between two looks at what is awaited
_SECONDS = 60.0


class _Log:
    """What has been read of the log."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.sums: dict[str, int] = {}
        """Sums that `add` has made, by the mark that it gave its line."""
        self._at = 0

    def read(self, fd: int) -> None:
        """Takes in the whole lines that have come since."""
        new = os.pread(fd, os.fstat(fd).st_size - self._at, self._at)
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                key, value, mark = json.loads(line)
            except ValueError:  # empty, or torn
                continue
            if mark:
                value = self.sums[mark] = int(self.values.get(key, 0)) + value
            self.values[key] = str(value)


class MemoryStore:
    """What is used of a ``torch.distributed.Store``, over the memory file ``fd``, which is closed with it.

    ``seconds``: how long `get` waits for a key.
    """

    def __init__(self, fd: int, seconds: float) -> None:
        self._fd, self._seconds = fd, seconds
        self._log = _Log()
        self._reading = threading.RLock()

    @classmethod
    def create(cls) -> Self:
        """A store of this process, to be opened by others."""
        fd = os.memfd_create(f"{MEMORY_NAME}store", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        return cls(fd, _SECONDS)

    @classmethod
    def open(cls, address: str, seconds: float = _SECONDS) -> Self:
        """The store at the `address` of the one that made it; raises `PeerLostError` if its process has let it go."""
        pid, fd, inode = address.split()
        gone = PeerLostError(f"the first rank (pid {pid}) left the group before all had joined it")
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            raise gone from None
        if os.fstat(own).st_ino != int(inode):  # the process has another file there by now
            os.close(own)
            raise gone
        return cls(own, seconds)

    @property
    def address(self) -> str:
        """Where the processes of this host find it."""
        return f"{os.getpid()} {self._fd} {os.fstat(self._fd).st_ino}"

    def set(self, key: str, value: str) -> None:
        """Stores a value."""
        self._append(key, value, "")

    def get(self, key: str) -> bytes:
        """The value of a key, once it has one. Raises `CollectiveTimeout` if it does not come in time."""
        deadline = time.monotonic() + self._seconds
        while (found := self._read().values.get(key)) is None:
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"no rank has set {key} in the store within {self._seconds:.3g} s")
            time.sleep(_PAUSE)
        return found.encode()

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, 0 at first; returns the sum."""
        mark = secrets.token_hex(8)
        self._append(key, value, mark)
        return self._read().sums[mark]

    def check(self, keys: Sequence[str]) -> bool:
        """True if all these keys have values."""
        values = self._read().values
        return all(key in values for key in keys)

    def _append(self, key: str, value: str | int, mark: str) -> None:
        os.write(self._fd, f"\n{json.dumps([key, value, mark])}\n".encode())

    def _read(self) -> _Log:
        # A signal handler may have come in the midst of this very function: what it was reading is not to be touched.
        log = _Log() if self._reading._is_owned() else self._log  # type: ignore[attr-defined]
        with self._reading:
            log.read(self._fd)
        return log

    def __del__(self) -> None:
        os.close(self._fd)
