"""What the parts of a movement share: terms of an update, calls of its group, what is bound to memory, tables."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from unisono.weights.windows import Window

__all__ = [
    "PACKED",
    "SLOTS",
    "UNCHANGED",
    "Bound",
    "GroupFailed",
    "Key",
    "Numbers",
    "Terms",
    "call",
    "followed",
    "half_of",
    "rounds",
    "table_in",
]

PACKED, UNCHANGED = -1, -2
_KEPT = 2  # bindings: to the model and to a snapshot, or to two standbys

SLOTS = 16
"""Parts of a bucket, used in turn: half of them are packed while the others are read."""
T = TypeVar("T")
Numbers = NDArray[np.int64]
Key = tuple[Any, ...]
"""Names tensors and their memory: equal where all lie as before."""


class GroupFailed(Exception):
    """A call of the group failed: the sign of something that went wrong at some rank."""


class Terms(NamedTuple):
    """What the ranks have agreed on for one update: whether tables go first, what is checked, until when.

    exposed: memory into which sources put, as `Movement.exposed` has it; else empty.
    """

    tables: bool
    checksum: bool
    deadline: float
    exposed: Mapping[int, tuple[int, int]]


def call(group: Any, what: str, *given: Any, seconds: float = 0.0) -> None:
    """A small collective of the group. Raises `GroupFailed`."""
    try:
        if what == "gather":
            group.allgather([given[0]], [given[1]]).wait()
        elif what == "meet":
            options = dist.BarrierOptions()
            options.asyncOp = False
            options.timeout = timedelta(seconds=max(seconds, 0.0) + 0.5)
            group.barrier(options)
        else:
            chosen = dist.AllreduceOptions()
            chosen.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN if what == "least" else dist.ReduceOp.MAX)
            group.allreduce([given[0]], chosen).wait()
    except RuntimeError as error:
        raise GroupFailed(f"{type(error).__name__}: {error}") from error


class Bound(Generic[T]):
    """Things made for tensors where they lie, kept while they may lie there again."""

    def __init__(self) -> None:
        self._kept: list[tuple[Key, T]] = []

    def of(self, key: Key, make: Callable[[], T]) -> T:
        """What was made for the tensors and the memory that ``key`` names, or is now."""
        for known, made in self._kept:
            if known == key:  # at once where a key of thousands of numbers is the same object; to hash it never is
                return made
        del self._kept[: len(self._kept) - _KEPT + 1]
        self._kept.append((key, make()))
        return self._kept[-1][1]


def table_in(memory: Tensor, start: int, count: int) -> Numbers:
    """A table of so many items in memory: its columns follow each other, so that one is read without the other."""
    columns: Numbers = memory[start : start + 16 * count].view(torch.int64).view(2, count).numpy()
    return columns.T


def half_of(windows: Sequence[Window]) -> int:
    """Bytes of half of the bucket for these windows."""
    return max(-(-max(window.nbytes for window in windows) // 64) * 64, 64)


def rounds(steps: Sequence[Sequence[Window]], oversubscribed: bool = False) -> list[range]:
    """The steps between two meetings of all ranks: 1, 3, 4, 4, …, 2, 1, so that little is packed or read alone.

    oversubscribed: there are more ranks than cores, which then hardly do both at once: 4, 8, 8, …, as few meetings as
    the slots allow, but for the first, until which all other ranks wait.
    Two rounds that follow each other fit into the slots: one is packed while the other is read.
    """
    found: list[range] = []
    first, stop = 0, max(map(len, steps), default=0)
    growth = (SLOTS // 4, SLOTS // 2) if oversubscribed else (1, 3, 4)
    while first < stop:
        count = min(growth[min(len(found), len(growth) - 1)], stop - first)
        if not oversubscribed:
            count = min(count, (stop - first + 1) // 2)
        found.append(range(first, first + count))
        first += count
    return found


def followed(count: int, oversubscribed: bool) -> list[range]:
    """Steps between two meetings, where those who follow take less time: so few that they wait little at the end.

    oversubscribed: all at once, for nobody follows while all cores are busy.
    """
    found: list[range] = []
    first, most = 0, count if oversubscribed else max(count // 6, 1)
    while first < count:
        stop = first + min(most, count if oversubscribed else (count - first + 1) // 2)
        found.append(range(first, stop))
        first = stop
    return found
