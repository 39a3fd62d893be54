"""Reads the records of a group's ranks from its shared memory, from outside, without changing anything.

The memory is found among the open files of the user's processes and read with ``pread``: nothing is mapped, nothing
written, no process is asked. Never imports torch.
"""

import os
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from unisono.runtime.header import SIGNATURE, Header, read_header
from unisono.transport.layout import (
    COMPLETED,
    COMPLETED_AT,
    DEVICE_ISSUED,
    EXIT_NOTE,
    HEADER,
    ISSUE_TIMES,
    ISSUED,
    ISSUED_AT,
    JOINED,
    LENGTH,
    MAGIC,
    MEETINGS,
    MEMORY_NAME,
    NAME,
    PID,
    STARTED,
    STATE,
    WRITING,
    Layout,
)
from unisono.transport.process import Identity
from unisono.watch.exit_notes import as_sentence
from unisono.watch.status_page import PAGE_NAME, PAGE_NBYTES, PageView

__all__ = ["Findings", "Member", "SegmentView", "read_segments"]

_DELETED = " (deleted)"


@dataclass(frozen=True)
class Member:
    """One rank's record in a group; times are ``time.monotonic_ns``. ``rank`` is global, pid 0: it never joined.

    ``device_issued``: calls on GPUs, of which ``device_header`` is the last one's.
    """

    rank: int
    who: Identity
    state: int
    meetings: int
    issued: int
    completed: int
    completed_at: int
    issue_times: tuple[int, ...]
    header: Header | None
    exit_note: str
    device_issued: int = 0
    device_header: Header | None = None

    def issued_at(self, number: int) -> int:
        """The time at which call ``number`` was issued; 0 if it is not kept any more, or not issued."""
        return (
            self.issue_times[number % ISSUE_TIMES]
            if self.issued - ISSUE_TIMES < number <= self.issued and number > 0
            else 0
        )

    @property
    def since(self) -> int:
        """The time at which the oldest pending call was issued; if there is none, at which the last completed."""
        return self.issued_at(self.completed + 1) if self.issued > self.completed else self.completed_at


@dataclass(frozen=True)
class SegmentView:
    """One group: its label and its members, by group rank, as they were at ``read_at`` (``time.monotonic_ns``)."""

    label: str
    members: tuple[Member, ...]
    read_at: int

    @property
    def global_ranks(self) -> list[int]:
        """The members' global ranks."""
        return [member.rank for member in self.members]

    def waited_for(self, member: Member) -> list[int]:
        """The global ranks that have not arrived at the meeting at which ``member`` is."""
        if member.issued <= member.completed:
            return []
        return [other.rank for other in self.members if other.meetings < member.meetings and other is not member]

    def lateness(self) -> tuple[int, dict[int, float]]:
        """The number of last calls that all ranks have issued, and each rank's mean delay behind the first, in s."""
        here = [member for member in self.members if member.who.pid]
        newest = min((member.issued for member in here), default=0)
        oldest = max((member.issued for member in here), default=0) - ISSUE_TIMES + 1
        numbers = [n for n in range(max(1, oldest), newest + 1) if all(m.issued_at(n) for m in here)]
        if not numbers or len(here) < 2:
            return 0, {}
        start = sum(min(m.issued_at(n) for m in here) for n in numbers)
        scale = 1e-9 / len(numbers)
        return len(numbers), {m.rank: (sum(map(m.issued_at, numbers)) - start) * scale for m in here}

    def pace(self) -> float:
        """Calls per second over the last calls of the first member; 0 if it had made none in a while."""
        times = sorted(filter(None, self.members[0].issue_times))
        if len(times) < 2 or self.read_at - times[-1] > max(1e9, 4 * max(b - a for a, b in pairwise(times))):
            return 0.0
        return (len(times) - 1) / max(1e-9, (times[-1] - times[0]) / 1e9)


@dataclass(frozen=True)
class Findings:
    """All groups and pages of this user's processes on this host."""

    memories: tuple[SegmentView, ...]
    pages: dict[Identity, PageView]


def read_segments() -> Findings:
    """Reads the open memory files of every process of this user. Takes no locks, wakes no process, writes nothing."""
    memories: dict[tuple[int, int], SegmentView] = {}
    pages: dict[Identity, PageView] = {}
    for path, name in _memory_files():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            status = os.fstat(fd)
            file = (status.st_dev, status.st_ino)
            if name == PAGE_NAME:
                page = PageView(os.pread(fd, PAGE_NBYTES, 0))
                if page.valid():
                    pages[page.identity()] = page
            elif file not in memories and (memory := _read(fd, name.removeprefix(MEMORY_NAME))) is not None:
                memories[file] = memory
        except (OSError, struct.error):
            continue
        finally:
            os.close(fd)
    return Findings(tuple(memories.values()), pages)


def _memory_files() -> Iterator[tuple[str, str]]:
    """Path and name of every memory file of unisono's that a process of this user keeps open."""
    mine = os.geteuid()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        folder = f"/proc/{pid}/fd"
        try:
            if os.stat(f"/proc/{pid}").st_uid != mine:
                continue
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue
            if target.startswith("/memfd:unisono"):
                yield f"{folder}/{name}", target.removeprefix("/memfd:").removesuffix(_DELETED)


def _global_ranks(label: str, world_size: int) -> list[int]:
    """The global ranks that a label ends with; without any, the group's own numbering: it is the default group."""
    found = re.search(r"\[([\d, ]+)\]$", label)
    global_ranks = [int(name) for name in found[1].split(",")] if found else []
    return global_ranks if len(global_ranks) == world_size else list(range(world_size))


def _read_note(fd: int, at: int, nbytes: int) -> str:
    """A rank's exit note as a sentence; empty while it writes it."""
    raw = os.pread(fd, nbytes, at)
    state = int.from_bytes(raw[:8], "little")
    whole = not state & WRITING and os.pread(fd, 8, at) == raw[:8]
    return as_sentence(raw[8 : 8 + (state & LENGTH)].decode("utf-8", "replace")) if whole else ""


def _read(fd: int, label: str) -> SegmentView | None:
    magic, world_size, mark = struct.unpack("<3Q", os.pread(fd, 24, 0))
    layout = Layout(world_size)
    if magic != MAGIC or mark != layout.mark:
        return None
    read_at = time.monotonic_ns()  # here, for the reader itself may wait for a core before it looks at the times
    data = os.pread(fd, layout.RECORD * world_size, layout.records)
    global_ranks = _global_ranks(label, world_size)
    words = struct.Struct(f"<{layout.RECORD // 8}Q")
    members = []
    for rank, record in enumerate(words.iter_unpack(data)):
        at = record[HEADER]
        header = read_header(os.pread(fd, SIGNATURE.size + 16 * world_size, at)) if at else None
        number, device_header = record[DEVICE_ISSUED], None
        if number:
            slot = rank * layout.DEVICE_CALLS + number % layout.DEVICE_CALLS
            raw = os.pread(fd, SIGNATURE.size + 16 * world_size, layout.device_headers + slot * layout.header)
            device_header = read_header(raw)
        exit_note = ""
        if record[STATE] > JOINED:
            exit_note = _read_note(fd, layout.texts + rank * layout.TEXTS + EXIT_NOTE * layout.TEXT, layout.TEXT)
        members.append(
            Member(
                rank=record[NAME] if record[PID] else global_ranks[rank],
                who=Identity(record[PID], record[STARTED]),
                state=record[STATE],
                meetings=record[MEETINGS],
                issued=record[ISSUED],
                completed=record[COMPLETED],
                completed_at=record[COMPLETED_AT],
                issue_times=record[ISSUED_AT : ISSUED_AT + ISSUE_TIMES],
                header=header,
                exit_note=exit_note,
                device_issued=number,
                device_header=device_header,
            )
        )
    return SegmentView(label, tuple(members), read_at)
