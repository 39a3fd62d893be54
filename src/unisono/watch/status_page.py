"""The status page of a process: its present wait, for peers and `unisono ps`, and a bell to ask for its stacks.

A page has three classes: `OwnPage`, this process's own, with the thread that answers requests; `PeerPage`, another
process's, mapped writable; `PageView`, a read-only view.

The page is an anonymous memory file that the process keeps open; another process of the same user finds it among the
descriptors in ``/proc/<pid>/fd``. A process writes its own page; others write three places of it: the request bell,
the verdict of a deadlock that they found it in, and the directory for its flight record. A sleeping thread answers
requests, so that a process that waits in unisono, sleeps or computes outside the interpreter lock can be asked for its
Python stacks. Reading a page (`PageView`) changes nothing in it and needs no answer.
"""

import ctypes
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.runtime.call_site import is_inner, is_standard
from unisono.transport import futex
from unisono.transport.process import Identity, OwnThread, alive, stopped
from unisono.watch.flight import dump_flight_record

__all__ = [
    "PAGE_NAME",
    "PAGE_NBYTES",
    "OwnPage",
    "PageView",
    "PeerPage",
    "close_own_page",
    "find_page",
    "own_page",
    "records",
    "save_record",
    "stacks",
]

PAGE_NAME = "unisono-watch"
"""The memory file's name."""
_SIZE = 1 << 20
PAGE_NBYTES = 64 * 1024
"""Bytes of it that describe the process; behind them is what it was asked about its job's other hosts."""
_MAGIC = 0x3147_4150_4F53_494E
_NO_ANSWER = "it does not answer: it is stopped, or busy outside Python with the interpreter lock held"
# Places, in 64-bit words unless said otherwise.
_BELL = 16  # 32-bit word
_SINCE = 20
_WAIT, _CHECKS, _COUNT, _EDGES, _MOST, _WORDS = 24, 25, 26, 27, 160, 3
# Places of texts, in bytes: a length in 8 bytes, then UTF-8.
_TEXT, _VERDICT, _FOLDER, _FILE, _ANSWER, _HOSTS = 4096, 8192, 12800, 14592, 16384, PAGE_NBYTES
_LIMITS = {
    _TEXT: 4088, _VERDICT + 8: 4088, _FOLDER: 1784, _FILE: 1784, _ANSWER: _HOSTS - _ANSWER - 8,
    _HOSTS: _SIZE - _HOSTS - 8,
}  # fmt: skip


class _Kind(NamedTuple):
    """A kind of requests: the places that say how often it was made and answered, and of the text of the answer."""

    asked: int
    answered: int
    text: int


_STACKS, _RECORD, _OTHERS = _Kind(16, 17, _ANSWER), _Kind(18, 19, _FILE), _Kind(21, 22, _HOSTS)


class PageView:
    """A read-only view of a page: a copy of its bytes, or the mapped page itself."""

    def __init__(self, raw: bytes | mmap.mmap) -> None:
        self.raw = raw
        self.longs = memoryview(raw).cast("Q")

    def valid(self) -> bool:
        """True if this is a complete page of this version."""
        return len(self.raw) in (_SIZE, PAGE_NBYTES) and self.longs[0] == _MAGIC

    def identity(self) -> Identity:
        """The process the page belongs to."""
        return Identity(self.longs[1], self.longs[2])

    def wait(self) -> tuple[int, int]:
        """The number of the present wait (0: none), and how many checks of peers it has made."""
        return self.longs[_WAIT], self.longs[_CHECKS]

    def since(self) -> int:
        """The start of this wait (``time.monotonic_ns``)."""
        return self.longs[_SINCE]

    def edges(self) -> list[Identity]:
        """The processes without which this wait can never end."""
        count = min(self.longs[_COUNT], _MOST)
        places = range(_EDGES, _EDGES + count * _WORDS, _WORDS)
        return [Identity(*self.longs[at : at + _WORDS]) for at in places]

    def text(self) -> str:
        """The wait of the process in words."""
        return self._read(_TEXT)

    def _read(self, at: int) -> str:
        size = self.longs[at // 8]
        return self.raw[at + 8 : at + 8 + size].decode("utf-8", "replace")


class PeerPage(PageView):
    """A page mapped by another process of the same user."""

    raw: mmap.mmap

    def __init__(self, fd: int, path: str = "") -> None:
        super().__init__(mmap.mmap(fd, _SIZE))
        self._path, self._file = path, os.fstat(fd).st_ino
        words, address = memoryview(self.raw).cast("I"), ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        self.bell = futex.Counter(words, _BELL, address)

    def open(self) -> bool:
        """True if the process keeps it open."""
        try:
            return os.stat(self._path).st_ino == self._file
        except TimeoutError:  # a signal handler's
            raise
        except OSError:
            return False

    def set_verdict(self, wait: int, text: str) -> None:
        """Publishes to the process that its wait can never end."""
        self._write(_VERDICT + 8, text)
        self.longs[_VERDICT // 8] = wait

    def verdict(self) -> tuple[int, str]:
        """The wait that was found to be deadlocked, and the words on it."""
        return self.longs[_VERDICT // 8], self._read(_VERDICT + 8)

    def others(self, seconds: float) -> str:
        """What the process has found out about its job's ranks on other hosts; nothing if there are none."""
        return self.answer(_OTHERS, self.request(_OTHERS), time.monotonic() + seconds)

    def request(self, kind: "_Kind", folder: str = "") -> int:
        """Asks the process without waiting; returns the request's number. ``folder``: for its flight record."""
        if kind is _RECORD:
            self._write(_FOLDER, folder)
        number = self.longs[kind.asked] = self.longs[kind.asked] + 1
        self.bell.add()
        return number

    def answer(self, kind: "_Kind", number: int, deadline: float) -> str:
        """The answer; nothing if the process does not give one in time (``time.monotonic`` seconds)."""
        while self.longs[kind.answered] < number:
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.002)
        return self._read(kind.text)

    def _write(self, at: int, text: str) -> None:
        data = text.encode()[: _LIMITS[at]]
        self.raw[at + 8 : at + 8 + len(data)] = data
        self.longs[at // 8] = len(data)


class OwnPage(PeerPage):
    """This process's own page, and the thread that answers for it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, _SIZE)
        super().__init__(self.fd)
        self.me = Identity.mine()
        self.longs[1], self.longs[2], self.longs[0] = self.me.pid, self.me.started, _MAGIC
        self._waits = 0
        self._known: dict[Identity, PeerPage | None] = {}
        self._ended = False
        self.find_others: Callable[[], str] = lambda: ""
        """What answers `others`."""
        self._main = threading.main_thread().ident
        self._thread = OwnThread(target=self._answer_requests, name="unisono watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # a page without an answering thread must not be found
            os.close(self.fd)
            raise

    def begin(self, text: str) -> int:
        """Publishes a wait; returns its number, or 0 if another thread's wait is published already."""
        if self.longs[_WAIT]:
            return 0
        self._waits += 1
        self._write(_TEXT, text)
        self.longs[_COUNT], self.longs[_CHECKS], self.longs[_SINCE] = 0, 0, time.monotonic_ns()
        self.longs[_WAIT] = self._waits
        return self._waits

    def set_text(self, text: str) -> None:
        """Publishes the wait in other words."""
        self._write(_TEXT, text)

    def publish_edges(self, edges: Sequence[Identity], whole: bool = True) -> None:
        """Publishes the processes that the wait certainly needs, as of now; a check is the ``whole`` of them."""
        for k, peer in enumerate(edges[:_MOST]):
            at = _EDGES + k * _WORDS
            self.longs[at], self.longs[at + 1], self.longs[at + 2] = peer.pid, peer.started, peer.host
        self.longs[_COUNT] = min(len(edges), _MOST)
        self.longs[_CHECKS] += whole

    def end(self) -> None:
        """Ends the publication of the wait."""
        self.longs[_WAIT] = 0

    def peer(self, identity: Identity) -> PeerPage | None:
        """The page of another process, or the last that it had: it closes its page with its last group."""
        if identity == self.me:
            return self
        known = self._known.get(identity)
        if known is None or not known.open():
            known = self._known[identity] = find_page(identity) or known
        return known

    def replaced(self, identity: Identity) -> bool:
        """True if a process that had a page, and lives, runs another program now (exec), with none of its memory."""
        page = self.peer(identity)
        if page is self or (page is not None and page.open()):
            return False
        try:
            with open(f"/proc/{identity.pid}/maps") as file:
                maps = file.read()  # nothing, while the process ends
        except TimeoutError:  # a signal handler's
            raise
        except OSError:
            return False
        return maps != "" and PAGE_NAME not in maps and alive(identity)

    def stacks_of(self, peers: Sequence[Identity], seconds: float) -> list[str]:
        """The stacks of each process; empty for one that does not answer."""
        return _ask_all([self.peer(peer) for peer in peers], _STACKS, seconds)

    def records_of(self, peers: Sequence[Identity], folder: str, seconds: float) -> None:
        """Asks processes to write their flight records into ``folder``, and waits for those that do so in time."""
        _ask_all([self.peer(peer) for peer in peers if peer != self.me], _RECORD, seconds, folder)

    def close(self) -> None:
        """Ends the thread and closes the page."""
        self._ended = True
        self.bell.add()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        os.close(self.fd)

    def _answer_requests(self) -> None:
        while not self._ended:
            seen = self.bell.value()
            served = self._serve(_STACKS, self._stacks)
            served = self._serve(_RECORD, lambda: save_record(self._read(_FOLDER))) or served
            if not (self._serve(_OTHERS, self.find_others) or served):
                self.bell.sleep(seen, 3600.0)

    def _serve(self, kind: _Kind, answer: Callable[[], str]) -> bool:
        """Answers the newest request of a kind, and so the older ones; returns whether there was one."""
        asked = self.longs[kind.asked]
        if self.longs[kind.answered] >= asked:
            return False
        self._write(kind.text, answer())
        self.longs[kind.answered] = asked
        return True

    def _stacks(self) -> str:
        """First line: the main thread's innermost frame of the user's, else any but ours; then all stacks."""
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # of no use, and it would refer to itself
        frame = frames.get(self._main or 0)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        outer = [f for f in stack if not is_inner(f.filename)]
        users = [f for f in outer if not is_standard(f.filename)] or outer
        top = f"{users[-1].filename}:{users[-1].lineno} in {users[-1].name}" if users else "no Python code of its own"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"{top}: {users[-1].line}" if users and users[-1].line else top]
        for ident, inner in sorted(frames.items(), key=lambda item: item[0] != self._main):
            lines.append(f"thread {names.get(ident, ident)}:")
            lines += [f"  {f.filename}:{f.lineno} in {f.name}" for f in reversed(traceback.extract_stack(inner))]
        return "\n".join(lines)


def save_record(folder: str) -> str:
    """Writes this process's flight record into ``folder``; the file, or ``! `` and why there is none."""
    try:
        return str(dump_flight_record(folder))
    except UnisonoError as error:
        return f"! {error}"


def find_page(identity: Identity) -> PeerPage | None:
    """The page of a process of this user; None if it has none or may not be read."""
    folder = f"/proc/{identity.pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{PAGE_NAME}"):
                page = _map(f"{folder}/{name}")
                if page is not None and page.valid() and page.identity() == identity:
                    return page
    except OSError:
        return None
    return None


def _map(path: str) -> PeerPage | None:
    """The page in a file; None if its process has just made it, and given it no size yet."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return PeerPage(fd, path) if os.fstat(fd).st_size == _SIZE else None
    finally:
        os.close(fd)


def _ask_all(pages: Sequence[PeerPage | None], kind: _Kind, seconds: float, folder: str = "") -> list[str]:
    """The answers of several processes, asked at once; empty for one that has no page, or does not answer in time."""
    numbers = [page.request(kind, folder) if page else 0 for page in pages]
    deadline = time.monotonic() + seconds
    return [page.answer(kind, number, deadline) if page else "" for page, number in zip(pages, numbers, strict=True)]


def _of_ranks(identities: Mapping[int, Identity], kind: _Kind, seconds: float, folder: str = "") -> dict[int, str]:
    pages = [None if stopped(who) else find_page(who) for who in identities.values()]
    return dict(zip(identities, _ask_all(pages, kind, seconds, folder), strict=True))


def stacks(identities: Mapping[int, Identity]) -> dict[int, str]:
    """Every rank's Python stacks, in text, asked for at once and waited for at most a second."""
    answers = _of_ranks(identities, _STACKS, 1.0)
    return {rank: answer.partition("\n")[2] or _NO_ANSWER for rank, answer in answers.items()}


def records(identities: Mapping[int, Identity], folder: str) -> dict[int, str]:
    """Asks every rank to write its flight record into ``folder``; the files, or ``! `` and why there is none."""
    answers = _of_ranks(identities, _RECORD, 5.0, folder)
    return {rank: answer or f"! {_NO_ANSWER}" for rank, answer in answers.items()}


_mine: OwnPage | None = None


def own_page() -> OwnPage:
    """The page of this process, made with its first group, and again after `close_own_page`."""
    global _mine
    if _mine is None:
        _mine = OwnPage()
    return _mine


def close_own_page() -> None:
    """Closes the page of this process, if there is one: it is in no group any more."""
    global _mine
    if _mine is not None:
        mine, _mine = _mine, None
        mine.close()


def _forget() -> None:
    """In a forked child: the page is the parent's."""
    global _mine
    if _mine is not None:
        os.close(_mine.fd)
        _mine = None


os.register_at_fork(after_in_child=_forget)
