"""One copy of a version for all mapped replicas of a host: their tensors are private, copy-on-write views of it.

The copy lies in an anonymous memory file. The first sender makes it, or takes one that no replica shows any more; all
senders write their parts; replicas open it through ``/proc/<pid>/fd`` and map it privately. It lives as long as it is
mapped anywhere, whatever becomes of the sender. Each byte is checked by one of the replicas that share it.
"""

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.transport.inference import outside_inference
from unisono.transport.layout import MEMORY_NAME
from unisono.transport.shared_heap import MAP_NORESERVE
from unisono.weights.fit import Fit
from unisono.weights.layout import Layout, whole_part
from unisono.weights.movement import GroupFailed
from unisono.weights.wire import Who

__all__ = ["Copies", "File", "check_mappable", "places_in"]


class Place(NamedTuple):
    """Where a whole tensor lies in the file."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def places_in(fit: Fit) -> tuple[dict[str, Place], int]:
    """The places of all tensors of a replica, and the bytes of the file."""
    found, end = {}, 0
    for name, value in fit.tensors.items():
        start = -(-end // 64) * 64
        found[name] = Place(start, value.shape, value.dtype)
        end = start + int(np.prod(value.shape, dtype=np.int64)) * value.dtype.itemsize
    return found, max(end, 1)


def check_mappable(name: str, fit: Fit, layout: Layout, own: int, tensors: Mapping[str, Tensor], free: set[str]) -> None:
    """Raises `UsageError` if a tensor of a replica's rank can not be a view of a published copy."""
    for each in fit.tensors:
        tensor = tensors.get(each)
        problem = ""
        if tensor is None or layout[each].parts[own] not in (whole_part(layout[each].shape), ()):
            problem = "is cut over the ranks of the replica"
        elif tensor.device.type != "cpu":
            problem = f"is on {tensor.device}"
        elif each not in free and tensor.numel():
            problem = "shares its memory with another tensor, or does not fill it"
        if problem:
            raise UsageError(f"replica {name!r} can not be mapped: {each} {problem}; leave mapped=True out")


class File:
    """A memory file, mapped: shared by those who write it, privately by those who show it."""

    @outside_inference
    def __init__(self, fd: int, nbytes: int, nonce: int, shared: bool) -> None:
        self.fd, self.nonce = fd, nonce
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | MAP_NORESERVE
        self.bytes = torch.frombuffer(mmap.mmap(fd, nbytes, flags), dtype=torch.uint8)

    def tensors(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """The tensors in the file."""
        made = {}
        for name, (start, shape, dtype) in places.items():
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            made[name] = self.bytes[start : start + nbytes].view(dtype).view(shape)
        return made


class Copies:
    """The files of one kind of replica, at a sender's rank; the first of them makes them."""

    def __init__(self, fit: Fit) -> None:
        self.places, self.nbytes = places_in(fit)
        self._made: dict[int, File] = {}
        self._shown: dict[int, set[int]] = {}  # by nonce: the ranks that map it, or once did and have not let go
        self.current: File | None = None

    def next(self, ranks: Sequence[int], shown: Mapping[int, int]) -> File:
        """A file that nobody shows; ``shown``: the nonces that the ranks of the line-up show now."""
        for nonce, users in self._shown.items():
            users -= {rank for rank, other in shown.items() if other != nonce}
        free = next((nonce for nonce, users in self._shown.items() if not users), None)
        if free is None:
            fd = os.memfd_create(f"{MEMORY_NAME}weights", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, self.nbytes)
            free = secrets.randbits(62) | 1
            self._made[free] = File(fd, self.nbytes, free, shared=True)
        self._shown[free] = set(ranks)
        self.current = self._made[free]
        return self.current

    def open(self, who: Who, fd: int, nonce: int) -> File:
        """The file that the first sender has made, for another to write."""
        if nonce not in self._made:
            self._made[nonce] = open_file(who, fd, self.nbytes, nonce, shared=True)
        self.current = self._made[nonce]
        return self.current

    def close(self) -> None:
        """Lets the files go; those that are mapped elsewhere stay there."""
        for file in self._made.values():
            os.close(file.fd)
        self._made.clear()


def open_file(who: Who, fd: int, nbytes: int, nonce: int, shared: bool) -> File:
    """A file of another process. Raises `GroupFailed` if that is gone."""
    try:
        found = os.open(f"/proc/{who.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            made = File(found, nbytes, nonce, shared)
        except BaseException:
            os.close(found)
            raise
    except (OSError, ValueError) as error:
        raise GroupFailed(f"the published copy of {who} can not be mapped: {error}") from None
    if not shared:
        os.close(found)
    return made


def let_go(thing: Any) -> None:
    """Closes it, whatever state it is in."""
    with suppress(OSError):
        thing.close()
