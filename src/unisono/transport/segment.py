"""The memory that the ranks of one group share on a host: its layout, its birth and its joining.

The segment is an anonymous memory file (memfd) made by the group's rank 0 and opened by the others through
``/proc/<pid>/fd``. It has no name in any file system: /dev/shm may be tiny, no end of a process, however sudden, leaves
a file behind, and no process listens on a socket. Its mode is 0600. Pages exist once touched, so a generous layout is
free.
"""

import ctypes
import errno
import mmap
import os
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.transport import futex
from unisono.transport.host import Host
from unisono.transport.inference import outside_inference
from unisono.transport.layout import (
    FIELDS,
    ISSUED,
    LENGTH,
    MAGIC,
    MEMORY_NAME,
    PAGE,
    PID,
    STATE,
    WRITING,
    Layout,
)
from unisono.transport.process import Identity, cores

__all__ = ["Absentees", "Founder", "Segment", "StoreLike", "attach", "create"]

_TRIES = 50  # looks at a text that is being written


class StoreLike(Protocol):
    """The methods used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


class Absentees(Protocol):
    """Ranks that have not joined a segment; of one that is ``gone``: words, first cause, its process."""

    def identity(self, rank: int) -> Identity: ...  # noqa: D102
    def gone(self, rank: int) -> tuple[str, str, Identity | None]: ...  # noqa: D102
    def mismatch(self) -> str: ...  # noqa: D102


class Elsewhere(Protocol):
    """The ranks of a group that are on other hosts than the ``local`` ones.

    ``ended``: the state and exit note of one that is gone; ``gone``: the same, of one that has not just given up;
    ``proxies``: the local ranks that lay down what one sends; ``shrinking``: its text of that kind.
    """

    @property
    def local(self) -> Sequence[int]: ...
    @property
    def ranks_of_hosts(self) -> tuple[tuple[int, ...], ...]: ...

    def __contains__(self, rank: int) -> bool: ...
    def proxies(self, rank: int) -> set[int]: ...
    def who(self, rank: int, name: int) -> str: ...
    def ended(self, rank: int) -> tuple[int, str] | None: ...
    def gone(self, rank: int) -> tuple[int, str] | None: ...
    def shrinking(self, rank: int) -> str: ...
    def publish_shrinking(self, text: str) -> None: ...
    def publish_header(self, number: int, header: bytes) -> None: ...
    def publish_message_end(self, peer: int, body: bytes) -> None: ...
    def address(self, rank: int) -> str: ...
    def publish(self, state: int, note: str) -> None: ...
    def activities(self, ranks: Sequence[int], patience: float) -> dict[int, tuple[str, str, str]]: ...
    def process(self, rank: int) -> Identity: ...
    def issued(self, rank: int) -> int: ...


class Founder(Protocol):
    """The rank that makes a segment: `check` raises if it never will, `late` is the error of a timeout.

    `elsewhere` is called if there is one on another host, of this ``nonce``, and raises `OnHosts` if it is of now.
    `barred` gives the error where this rank may not open what that process has, and lets the peers know.
    """

    def check(self) -> None: ...  # noqa: D102
    def elsewhere(self, nonce: str) -> None: ...  # noqa: D102
    def barred(self, pid: int) -> UnisonoError: ...  # noqa: D102
    def late(self) -> UnisonoError: ...  # noqa: D102


class Segment:
    """A mapped segment: the same memory as 32-bit words, 64-bit words, raw bytes and one torch tensor of uint8."""

    @outside_inference
    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self.absentees: Absentees | None = None
        self.elsewhere: Elsewhere | None = None
        self.store: StoreLike | None = None
        """Where the sub-groups of a default group on one host meet."""
        self.raw = mmap.mmap(fd, layout.total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(self.raw)
        self.words, self.longs = view.cast("I"), view.cast("Q")
        self.bytes = torch.frombuffer(self.raw, dtype=torch.uint8)
        # The array of one byte that gives the address keeps the mapping alive, as the tensor does.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))

    @property
    def nonce(self) -> str:
        """A number that no other segment has."""
        return self.raw[FIELDS * 8 : FIELDS * 8 + 16].decode()

    @property
    def oversubscribed(self) -> bool:
        """True if the ranks outnumber the cores of the host, as the first rank counts them."""
        return bool(self.longs[3])

    def text(self, rank: int, kind: int) -> str:
        """The text ``rank`` wrote last with `set_text`; empty if it died while it wrote."""
        start = self.layout.texts + rank * self.layout.TEXTS + kind * self.layout.TEXT
        for _ in range(_TRIES):
            state = self.longs[start // 8]
            futex.acquire()
            data = self.raw[start + 8 : start + 8 + (state & LENGTH)]
            futex.acquire()
            if not state & WRITING and self.longs[start // 8] == state:
                return data.decode("utf-8", "replace")
            time.sleep(0.0002)
        return ""

    def set_text(self, rank: int, kind: int, text: str) -> None:
        """Writes ``rank``'s text of a kind (CALL, EXIT_NOTE, TROUBLE) for the others to read, cut to the page it has.

        The word before it tells a reader whether it has read one text or parts of two.
        """
        start = self.layout.texts + rank * self.layout.TEXTS + kind * self.layout.TEXT
        data = text.encode()[: self.layout.TEXT - 8]
        times = self.longs[start // 8] & ~(WRITING | LENGTH)
        self.longs[start // 8] = times | WRITING
        futex.release()
        self.raw[start + 8 : start + 8 + len(data)] = data
        futex.release()
        self.longs[start // 8] = times + 2 * WRITING | len(data)

    def field(self, rank: int, index: int) -> int:
        """Place among ``longs`` of a rank's record word ``index``."""
        return (self.layout.records + rank * self.layout.RECORD) // 8 + index

    def state(self, rank: int) -> int:
        """The state of a rank: ABSENT, JOINED, LEFT or GAVE_UP."""
        return int(self.longs[self.field(rank, STATE)])

    def identity(self, rank: int) -> Identity:
        """The process that joined as ``rank``, or was announced to; pid 0 if none is known here."""
        at = self.field(rank, PID)
        if self.elsewhere is not None and rank in self.elsewhere:
            return Identity(0, 0)  # its pid means another process here
        if not self.longs[at] and self.absentees is not None:
            return self.absentees.identity(rank)
        return Identity(self.longs[at], self.longs[at + 1])

    def process(self, rank: int) -> Identity:
        """The same, of ranks on other hosts too."""
        return self.elsewhere.process(rank) if self.elsewhere and rank in self.elsewhere else self.identity(rank)

    def issued(self, rank: int) -> int:
        """The collectives that a rank has issued, as far as is known here."""
        known = int(self.longs[self.field(rank, ISSUED)])
        return max(known, self.elsewhere.issued(rank)) if self.elsewhere and rank in self.elsewhere else known


def create(store: StoreLike, world_size: int, name: str, nonce: str = "") -> tuple[Segment, int]:
    """The first rank makes the segment and publishes where it is; returns it with the descriptor to keep.

    ``nonce``: that of the other hosts' segments.
    """
    layout = Layout(world_size)
    fd = os.memfd_create(f"{MEMORY_NAME}{name}"[:200], os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, layout.total)
        segment = Segment(fd, layout)
        nonce = nonce or secrets.token_hex(8)
        segment.raw[FIELDS * 8 : FIELDS * 8 + 16] = nonce.encode()
        segment.longs[3] = int(world_size > cores())
        segment.longs[1], segment.longs[2], segment.longs[0] = world_size, layout.mark, MAGIC
        store.set("segment", f"{os.getpid()} {fd} {nonce} {Host.mine().to_text()} {world_size}")
    except BaseException:
        os.close(fd)
        raise
    return segment, fd


def attach(store: StoreLike, rank: int, world_size: int, deadline: float, founder: Founder) -> Segment:
    """Another rank waits for rank 0's segment and maps it.

    Raises ``founder.late()`` if rank 0 does not publish one before ``deadline`` (``time.monotonic`` seconds),
    whatever ``founder.check`` raises, what ``founder.barred`` gives if it may not be opened, `UsageError` if it was
    made for another world size or by another version of unisono.
    """
    pause = 0.0005
    while True:
        if store.check(["segment"]):
            segment = _open(store.get("segment").decode(), rank, world_size, founder)
            if segment is not None:
                return segment
        if time.monotonic() > deadline:
            raise founder.late()
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
        if pause >= 0.02:
            founder.check()


def _open(where: str, rank: int, world_size: int, founder: Founder) -> Segment | None:
    """The segment named in the store, or None if that note is a leftover of an earlier group."""
    pid, fd_there, nonce, host, made_for = where.split()
    if Host.from_text(host) != Host.mine():
        founder.elsewhere(nonce)
        return None
    try:
        fd = os.open(f"/proc/{pid}/fd/{fd_there}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise founder.barred(int(pid)) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return None
    try:
        if os.fstat(fd).st_size < PAGE or os.pread(fd, 16, FIELDS * 8) != nonce.encode():
            return None
        if int(made_for) != world_size:
            raise UsageError(
                f"rank {rank} was started with world_size {world_size}, rank 0 (pid {pid}) with {made_for}: "
                "give all ranks the same"
            )
        if os.pread(fd, 24, 0) != struct.pack("<3Q", MAGIC, world_size, Layout(world_size).mark):
            raise UsageError(
                f"rank {rank} runs another version of unisono than rank 0 (pid {pid}): give all ranks one installation"
            )
        segment = Segment(fd, Layout(world_size))
        # A segment that this very process is or was in belongs to an earlier group over the same store.
        return None if segment.identity(rank) == Identity.mine() else segment
    finally:
        os.close(fd)
