"""Parts of several families: messages of consecutive blocks around the circle of ranks, and the power-of-two core."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.algorithms.registry import algorithm_info, build
from unisono.errors import UsageError
from unisono.schedule import Schedule, Step

__all__ = ["Core", "build_level", "circular", "does_not_fit"]


def does_not_fit(name: str, collective: str, why: str) -> UsageError:
    """The error of an algorithm that cannot serve: names it and says why."""
    return UsageError(f"algorithm {name} does not fit {collective}: {why}")


def build_level(name: str, family: str, collective: str, world_size: int, root: int, chunks: int) -> Schedule:
    """The schedule of one level, inside hosts or between them. Raises UsageError if there is none, or for a switch."""
    if algorithm_info(name, collective).simulation_only:
        raise does_not_fit(family, collective, f"{name} needs a switch of its own at every level")
    return build(name, collective, world_size, root, chunks)


def circular(src: ArrayLike, dst: ArrayLike, first: ArrayLike, length: ArrayLike, world_size: int, pieces: int) -> Step:
    """A step of copies, each of `length` blocks from block `first` on, counting past the last block to block 0.

    A message that wraps becomes two transfers; messages of no blocks vanish.
    """
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(a, dtype=np.int64)) for a in (src, dst, first, length)))
    s, d, f, k = columns
    f = f % world_size
    head = np.minimum(k, world_size - f)
    parts = [(s, d, f, head), (s, d, np.zeros_like(f), k - head)]
    kept = [Step.make(a[n > 0], b[n > 0], c[n > 0] * pieces, n[n > 0] * pieces) for a, b, c, n in parts]
    return Step.together(*kept)


@dataclass(frozen=True)
class Core:
    """The largest power of two of ranks, for algorithms that halve and double.

    With n = p + x ranks, ranks 0 .. 2x-1 form x pairs; the odd rank of a pair acts for both. Core member j stands for
    blocks first(j) .. first(j+1)-1, so that aligned groups of members stand for neighbouring blocks.
    """

    world_size: int

    @property
    def size(self) -> int:
        """p, the number of members."""
        return 1 << (self.world_size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """x, the number of ranks that another one acts for."""
        return self.world_size - self.size

    @property
    def distances(self) -> list[int]:
        """1, 2, 4 .. p/2."""
        return [1 << i for i in range(self.size.bit_length() - 1)]

    @property
    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ranks that are acted for, and those that act for them."""
        even = 2 * np.arange(self.extra)
        return even, even + 1

    @property
    def members(self) -> NDArray[np.int64]:
        """The rank of each member, int64, shape (p,)."""
        j = np.arange(self.size)
        return np.where(j < self.extra, 2 * j + 1, j + self.extra)

    def first(self, member: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first block each member stands for; first(p) = n."""
        return np.where(member < self.extra, 2 * member, member + self.extra)
