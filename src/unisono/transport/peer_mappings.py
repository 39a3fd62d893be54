"""The shared heaps of the other ranks of a group (shared_heap.py), mapped into this process as they are needed.

A peer's heap is opened through ``/proc/<pid>/fd`` and mapped once, as a whole: that takes addresses, not memory. The
mapping serves all groups that both are in, and ends with the last of them.
"""

import ctypes
import mmap
import os
import weakref

import torch

from unisono.transport.inference import outside_inference
from unisono.transport.layout import HEAP, HEAP_NBYTES, HEAP_NONCE, PID
from unisono.transport.segment import Segment
from unisono.transport.shared_heap import MAP_NORESERVE

__all__ = ["PeerMappings"]

_MOST = 32 << 40  # bytes of addresses that the heaps of one group may take here


class _Mapped:
    """A peer's heap: its address here, and all of it as bytes."""

    @outside_inference
    def __init__(self, pid: int, fd_there: int, nbytes: int, nonce: int) -> None:
        """Raises `OSError` if it can not be opened or mapped, or is gone."""
        fd = os.open(f"/proc/{pid}/fd/{fd_there}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(fd, 8, 0) != nonce.to_bytes(8, "little"):
                raise FileNotFoundError(f"pid {pid} has another file there")
            raw = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | MAP_NORESERVE)
        finally:
            os.close(fd)
        raw.madvise(mmap.MADV_DONTDUMP)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8)
        self.base = self.bytes.data_ptr()


_mapped: "weakref.WeakValueDictionary[int, _Mapped]" = weakref.WeakValueDictionary()


class PeerMappings:
    """The heaps of its peers that one rank has mapped."""

    def __init__(self, segment: Segment, rank: int, world_size: int) -> None:
        self._segment, self._rank, self._size = segment, rank, world_size
        self._mapped: dict[int, _Mapped] = {}
        self._refused: set[int] = set()
        self.bases = (ctypes.c_int64 * world_size)()
        """Addresses of the heaps of all ranks here, 0 where there is none; compiled loops read them too."""

    def map_peers(self, root: int) -> None:
        """Maps the heaps that this rank reads and has not mapped: the root's, or all (root -1, or this rank).

        A heap that could not be mapped once is not tried again.
        """
        for rank in range(self._size) if root in (-1, self._rank) else (root,):
            if rank == self._rank or self.bases[rank] or rank in self._refused:
                continue
            word = [self._segment.longs[self._segment.field(rank, k)] for k in (PID, HEAP, HEAP_NBYTES, HEAP_NONCE)]
            pid, number, nbytes, nonce = word
            if not number:
                continue
            try:
                if nbytes * self._size > _MOST:
                    raise OSError("too many addresses")
                found = _mapped.get(nonce)
                if found is None:
                    found = _mapped[nonce] = _Mapped(pid, number - 1, nbytes, nonce)
            except (OSError, ValueError, OverflowError):
                self._refused.add(rank)
                continue
            self._mapped[rank], self.bases[rank] = found, found.base

    def memory(self, rank: int) -> torch.Tensor | None:
        """All of a peer's heap as bytes, None if it can not be mapped."""
        self.map_peers(rank)
        found = self._mapped.get(rank)
        return found.bytes if found is not None else None

    def forget(self) -> None:
        """Ends the mappings that no other group of this process needs."""
        self._mapped.clear()
        self.bases[:] = [0] * self._size
