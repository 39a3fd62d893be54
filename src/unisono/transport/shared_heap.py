"""The shared heap of this process: one anonymous file of shared tensors, which other ranks may map as a whole.

The heap is as large as the host's memory in addresses, and takes memory only where a tensor lies: a page is there once
it is touched, and is given back (``MADV_REMOVE``, in every process that maps it) as soon as its tensor dies. So one
descriptor and one mapping per peer serve any number of tensors, for the life of the process, and whether a tensor is
shared is a comparison of addresses. The file has no name, its mode is 0600, and nothing is left of it however the
process ends.

A forked child keeps what its parent had when it was forked: what dies in the parent later is not used again, nor given
back, until that child has ended, which the parent learns from a pipe whose other end the child never closes. Shared
tensors that the child makes lie in a heap of its own. Never imports torch.
"""

import ctypes
import mmap
import os
import secrets
import select
import threading
import weakref
from bisect import insort
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from unisono.transport.layout import HEAP, HEAP_NBYTES, HEAP_NONCE, MEMORY_NAME, PAGE

if TYPE_CHECKING:
    from unisono.transport.segment import Segment

__all__ = ["BOUNDS", "MAP_NORESERVE", "SharedHeap", "announce", "keep", "place", "shared_heap"]

MAP_NORESERVE = 0x4000
BOUNDS = (ctypes.c_int64 * 2)(0, 0)
"""First address of this process's heap, and the one after its last; compiled loops read them too."""
_MOST = 256 << 30  # bytes of addresses

_segments: "weakref.WeakKeyDictionary[Segment, int]" = weakref.WeakKeyDictionary()
_heap: "SharedHeap | None" = None
_making = threading.RLock()
_kept: list[object] = []  # what must not be used again as long as this process lives


class SharedHeap:
    """Ranges of one anonymous file, handed out in pages."""

    def __init__(self) -> None:
        """Raises `OSError` where the system grants no addresses (``ulimit -v``)."""
        self.nbytes = min(os.sysconf("SC_PHYS_PAGES") * PAGE, _MOST)
        self.nonce = secrets.randbits(62) | 1
        self.fd = os.memfd_create(f"{MEMORY_NAME}tensors", os.MFD_CLOEXEC)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, self.nbytes)
            self._raw = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED | MAP_NORESERVE)
        except BaseException:
            os.close(self.fd)
            raise
        self._raw.madvise(mmap.MADV_DONTDUMP)
        self._raw[:8] = self.nonce.to_bytes(8, "little")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._raw))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._free = [(PAGE, self.nbytes)]  # first and last-plus-one byte, in order, none touching the next
        self._returned: deque[tuple[int, int]] = deque()  # no lock: a tensor may die at any moment, in any thread
        self._withheld: deque[tuple[int, int, int]] = (
            deque()
        )  # the same, with the number of its birth: a child may use it
        self._children: list[tuple[int, int]] = []  # a pipe that ends with a child, and the births before its fork
        self._births = 0

    def allocate(self, nbytes: int) -> ctypes.Array[ctypes.c_char] | None:
        """Memory of ``nbytes``, more than 0, freed with the last reference to the array; None if there is no room.

        None, too, in a signal handler or finalizer that interrupts this.
        """
        if _entered(self._lock):
            return None
        length = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._collect()
            found = next((i for i, (start, stop) in enumerate(self._free) if stop - start >= length), None)
            if found is None:
                return None
            start, stop = self._free[found]
            self._free[found : found + 1] = [(start + length, stop)] if stop - start > length else []
            self._births += 1
            birth = self._births
        memory = (ctypes.c_char * nbytes).from_address(self.base + start)
        weakref.finalize(memory, self._release, start, start + length, birth).atexit = False
        return memory

    def _release(self, start: int, stop: int, birth: int) -> None:
        """The last reference is gone; runs wherever that happens, so without the lock."""
        if os.getpid() != self._pid:
            return
        if any(birth <= before for _, before in self._children):
            self._withheld.append((start, stop, birth))
            return
        try:
            with suppress(OSError):  # then the memory is kept, for the next tensor
                self._raw.madvise(mmap.MADV_REMOVE, start, stop - start)
        finally:
            self._returned.append((start, stop))

    def _collect(self) -> None:
        """Returns released ranges to the free list. Lock held."""
        self._children = [child for child in self._children if _lives(child[0])]
        for _ in range(len(self._withheld)):
            self._release(*self._withheld.popleft())
        while self._returned:
            start, stop = self._returned.popleft()
            insort(self._free, (start, stop))
            at = self._free.index((start, stop))
            if at + 1 < len(self._free) and self._free[at + 1][0] == stop:
                self._free[at : at + 2] = [(start, self._free[at + 1][1])]
            if at and self._free[at - 1][1] == start:
                self._free[at - 1 : at + 1] = [(self._free[at - 1][0], self._free[at][1])]

    def forked(self, pipe: int) -> None:
        """In the parent of a child that holds the other end of ``pipe``."""
        if not _entered(self._lock):
            with self._lock:
                self._collect()
        self._children.append((pipe, self._births))

    def disown(self) -> None:
        """In a forked child: only the memory stays, for tensors that were there before."""
        for descriptor in (self.fd, *(pipe for pipe, _ in self._children)):
            os.close(descriptor)


def _entered(lock: Any) -> bool:
    """Returns True if this thread holds an RLock already: it has been interrupted there."""
    held: bool = lock._is_owned()
    return held


def _lives(pipe: int) -> bool:
    """Returns True if a process holds the other end of a pipe; closes this one otherwise."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if not poll.poll(0):
        return True
    os.close(pipe)
    return False


def shared_heap() -> SharedHeap | None:
    """This process's heap, made at the first call and announced to all its groups; None if the system refuses it.

    None, too, in a signal handler or finalizer that interrupts the making.
    """
    global _heap
    if _heap is None and not _entered(_making):
        with _making:
            if _heap is None:
                try:
                    made = SharedHeap()
                except OSError:
                    return None
                for segment, rank in list(_segments.items()):
                    _write(made, segment, rank)
                BOUNDS[0], BOUNDS[1] = made.base, made.base + made.nbytes
                _heap = made
    return _heap


def announce(segment: "Segment", rank: int) -> None:
    """Publishes this process's heap to the peers in ``segment``, now or as soon as there is one."""
    with _making:
        _segments[segment] = rank
        if _heap is not None:
            _write(_heap, segment, rank)


def _write(made: SharedHeap, segment: "Segment", rank: int) -> None:
    longs, field = segment.longs, segment.field
    longs[field(rank, HEAP)] = made.fd + 1
    longs[field(rank, HEAP_NBYTES)], longs[field(rank, HEAP_NONCE)] = made.nbytes, made.nonce


def place(address: int, nbytes: int) -> int:
    """The offset of the bytes in this process's heap, or -1 if they do not lie there."""
    return address - BOUNDS[0] if BOUNDS[0] <= address and address + nbytes <= BOUNDS[1] else -1


def keep(*things: object) -> None:
    """Keeps things for the life of this process: memory that a peer, late in a failed call, may still write."""
    _kept.extend(things)


_pipe: tuple[int, int] | None = None  # of the fork under way


def _before_fork() -> None:
    global _pipe
    _making.acquire()
    _pipe = os.pipe() if _heap is not None else None


def _after_in_parent() -> None:
    global _pipe
    if _pipe is not None and _heap is not None:
        os.close(_pipe[1])
        _heap.forked(_pipe[0])
    _pipe = None
    _making.release()


def _after_in_child() -> None:
    global _heap, _pipe, _making
    _making = threading.RLock()
    if _pipe is not None and _heap is not None:
        os.close(_pipe[0])
        _heap.disown()
        keep(_heap)
    BOUNDS[0] = BOUNDS[1] = 0
    _heap = _pipe = None
    _segments.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
