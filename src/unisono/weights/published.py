"""One copy of a version for all mapped replicas of a host: their tensors are private, copy-on-write views of it.

The copy lies in an anonymous memory file. The first sender makes it, or takes one that no replica shows any more; all
senders write their parts; replicas open it through ``/proc/<pid>/fd`` and map it privately. It lives as long as it is
mapped anywhere, whatever becomes of the sender. Each byte is checked by one of the replicas that share it.
"""

import mmap
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.transport.inference import outside_inference
from unisono.transport.layout import MEMORY_NAME
from unisono.transport.shared_heap import MAP_NORESERVE
from unisono.weights.fit import Fit
from unisono.weights.holdings import Memory
from unisono.weights.layout import Layout, whole_part
from unisono.weights.wire import Who

__all__ = ["Copies", "File", "Place", "check_mappable", "places_of"]


_SHARED = "shares its memory with another tensor (a view, a state_dict's) or process, or leaves gaps in it"
_MOST = 4  # files that are kept for another version


class Place(NamedTuple):
    """Where a whole tensor lies in the file."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def places_of(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[dict[str, Place], int]:
    """The places of tensors (name, shape, dtype) that follow each other, and the bytes of the file."""
    found, end = {}, 0
    for name, shape, dtype in tensors:
        start = -(-end // 64) * 64
        found[name] = Place(start, shape, dtype)
        end = start + prod(shape) * dtype.itemsize
    return found, max(end, 1)


def check_mappable(
    name: str, fit: Fit, layout: Layout, own: int, tensors: Mapping[str, Tensor], free: set[str]
) -> None:
    """Raises `UsageError` if a tensor of a replica's rank can not be a view of a published copy."""
    for each in fit.tensors:
        tensor = tensors.get(each)
        problem = ""
        if tensor is None or layout[each].parts[own] not in (whole_part(layout[each].shape), ()):
            problem = "is cut over the ranks of the replica"
        elif tensor.device.type != "cpu":
            problem = f"is on {tensor.device}"
        elif each not in free and tensor.numel():
            problem = "was made in inference mode" if tensor.is_inference() else _SHARED
        if problem:
            raise UsageError(f"replica {name!r} can not be mapped: {each} {problem}; leave mapped=True out")


class File:
    """A memory file, mapped: shared by those who write or check it, privately by those who show it.

    Mappings are kept for the next version that the file takes.
    """

    @outside_inference
    def __init__(self, fd: int, nbytes: int, nonce: int, shared: bool) -> None:
        self.fd, self.nonce = fd, nonce
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | MAP_NORESERVE
        self._memory = mmap.mmap(fd, nbytes, flags)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._tensors: dict[str, Tensor] = {}
        self._look = -1
        self._landing: dict[str, Tensor] = {}
        self._pointers: tuple[int, ...] | None = None

    def again(self) -> "File":
        """The same with what the file has now, whatever was written to a private mapping."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        return self

    @outside_inference
    def tensors(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """The tensors in the file, always the same ones."""
        if not self._tensors:
            for name, (start, shape, dtype) in places.items():
                nbytes = prod(shape) * dtype.itemsize
                self._tensors[name] = self.bytes[start : start + nbytes].view(dtype).view(shape)
        return self._tensors

    def landing(self, places: Mapping[str, Place], names: Iterable[str], look: int) -> Memory:
        """The tensors in the file in the order of ``names``, which ``look`` numbers, and where they begin."""
        if self._look != look or self._pointers is None:
            tensors = self.tensors(places)
            self._look, self._landing = look, {name: tensors[name] for name in names if name in tensors}
            self._pointers = tuple(map(Tensor.data_ptr, self._landing.values()))
        return Memory(dict(self._landing), self._pointers)


class Copies:
    """The files of one kind of replica, at a sender's rank; the first of them makes them."""

    def __init__(self, fit: Fit) -> None:
        self.places, self.nbytes = places_of((name, each.shape, each.dtype) for name, each in fit.tensors.items())
        self._made: dict[int, File] = {}
        self._private: dict[int, File] = {}
        self._shown: dict[int, set[int]] = {}  # by nonce: the ranks that map it, or once did and have not let go

    def next(self, ranks: Sequence[int], shown: Mapping[int, int]) -> File:
        """A file that nobody shows; ``shown``: the nonces that the ranks of the line-up show now."""
        for nonce, users in self._shown.items():
            users -= {rank for rank, other in shown.items() if other != nonce}
        free = next((nonce for nonce, users in self._shown.items() if not users), None)
        while free is None and len(self._made) >= _MOST:  # shown by ranks that will not say when they let go
            oldest = next(iter(self._made))
            os.close(self._made.pop(oldest).fd)
            del self._shown[oldest]
        if free is None:
            fd = os.memfd_create(f"{MEMORY_NAME}published weights", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, self.nbytes)
            free = secrets.randbits(62) | 1
            self._made[free] = File(fd, self.nbytes, free, shared=True)
        self._shown[free] = set(ranks)
        return self._made[free]

    def made(self, nonce: int) -> File:
        """The file of a number."""
        return self._made[nonce]

    def open(self, who: Who, fd: int, nonce: int, writes: bool) -> File:
        """The file that the first sender has made: for a rank that ``writes`` the shared mapping, else the private one.

        Raises `OSError` or `ValueError` if that is gone.
        """
        known = self._made.get(nonce)
        if known is None:
            own = os.open(f"/proc/{who.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                known = File(own, self.nbytes, nonce, shared=True)
            except BaseException:
                os.close(own)
                raise
            while len(self._made) >= _MOST:
                oldest = next(iter(self._made))
                os.close(self._made.pop(oldest).fd)
                self._private.pop(oldest, None)
            self._made[nonce] = known
        if writes:
            return known
        if nonce in self._private:
            return self._private[nonce].again()
        made = self._private[nonce] = File(known.fd, self.nbytes, nonce, shared=False)
        return made

    def close(self) -> None:
        """Lets the files go; those that are mapped elsewhere stay there."""
        for file in self._made.values():
            os.close(file.fd)
        self._made.clear()
        self._private.clear()
