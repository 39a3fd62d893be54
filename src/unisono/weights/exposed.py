"""Memory that a target exposes: sources put what they send where the target wants it, in one pass and without a bucket.

A target's next version lands in a memory file of its own, which sources map. Nothing is written there once they have
reported that all is moved, and what is shown lies there only after that. After an update that failed, or a fork of the
process, the file is not exposed again: a source that was stopped, or a child that reads the version of its birth, may
still have it.
"""

import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.transport.inference import outside_inference
from unisono.transport.layout import MEMORY_NAME
from unisono.weights.layout import Part
from unisono.weights.packing import Move
from unisono.weights.plan import Plan
from unisono.weights.published import File, Place, places_of
from unisono.weights.rows import contiguous

__all__ = ["Exposed", "own_places", "own_shape", "put_move", "written"]

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_forked)


class Exposed(File):
    """A memory file of this process, which sources may write to."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create(f"{MEMORY_NAME}standby", os.MFD_CLOEXEC)
        self._end = weakref.finalize(self, os.close, fd)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        super().__init__(fd, nbytes, os.fstat(fd).st_ino, shared=True)
        self._forks = _forks
        self._asked: tuple[tuple[int, ...] | None, bool] = None, False

    @property
    def fresh(self) -> bool:
        """True if no child of this process may have it."""
        return self._forks == _forks

    def holds(self, pointers: tuple[int, ...]) -> bool:
        """True if something lies in it."""
        if pointers is self._pointers:
            return True
        if self._asked[0] is not pointers:
            start, given = self.bytes.data_ptr(), np.array(pointers, dtype=np.int64)
            self._asked = pointers, bool(((given >= start) & (given < start + self.bytes.nbytes)).any())
        return self._asked[1]


@outside_inference
def written(pid: int, fd: int, inode: int) -> Tensor:
    """At a source: the memory that process ``pid`` exposes. Raises `OSError` if that is gone."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        about = os.fstat(own)
        if about.st_ino != inode:
            raise FileNotFoundError(f"process {pid} has another file there")
        return torch.frombuffer(mmap.mmap(own, about.st_size), dtype=torch.uint8)
    finally:
        os.close(own)


def own_shape(part: Part) -> tuple[int, ...]:
    """The shape of a rank's own tensor, of which it holds this part."""
    ends = [tuple(a + n for a, n in zip(box.at, box.shape, strict=True)) for box in part]
    return tuple(map(max, zip(*ends, strict=True)))


def own_places(plan: Plan, replica: int, own: int) -> tuple[dict[str, Place], int]:
    """Where the tensors that a replica's rank receives lie in what it exposes, and the bytes of that."""
    layout = plan.receivers[replica]
    parts = {name: layout[name].parts[own] for name in plan.fits[replica].tensors}
    return places_of((name, own_shape(part), layout[name].dtype) for name, part in parts.items() if part)


def put_move(move: Move, there: Any, place: Place) -> Move:
    """A source's move of a block into what its target exposes; ``there``: the move of the same block at the target."""
    steps = contiguous(place.shape, move.dtype.itemsize)
    start = place.start + sum(at * step for at, step in zip(there.at, steps, strict=True))
    return move._replace(start=start, strides=steps)
