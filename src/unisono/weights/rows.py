"""Rows: runs of bytes that are copied, summed, or both in one pass, as the compiled loop takes them.

A row is 21 words: where the source is, where the target, bytes of a run, the run's first byte in the whole tensor, the
word to which its sum is added; then for four outer dims, the outermost first, how many runs there are, and how many
bytes they are apart in the source, in the target and in the whole. The loop is runtime/checksum_loop.py, where there is
numba; elsewhere NumPy does the same.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.loops import CHECKSUM, loops, wanted

__all__ = ["Place", "Rows", "address_of", "contiguous", "rows_of"]

Shape = tuple[int, ...]
_WORDS, _COLUMNS, _OUTER = 1024, 21, 4
_AT_ONCE = 1 << 16  # elements that NumPy looks at together
_WORTH = 8 << 20  # bytes that NumPy takes before the loop is compiled
_MASK = (1 << 64) - 1


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """An odd 64-bit number for each: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1))


WEIGHTS = ((mixed(np.arange(1 << 20, (1 << 20) + _WORDS, dtype=np.uint64)) >> np.uint64(32)) | np.uint64(1)).astype(
    np.uint32
)


def address_of(array: NDArray[Any]) -> int:
    """Where an array's memory begins."""
    return int(array.__array_interface__["data"][0])


_WEIGHTS_AT = address_of(WEIGHTS)


class Place(NamedTuple):
    """Where a block lies: its first byte, and how many bytes neighbours along each dim are apart."""

    start: int
    strides: Shape


def contiguous(shape: Sequence[int], itemsize: int) -> Shape:
    """The strides, in bytes, of a tensor without gaps."""
    found, step = [], itemsize
    for length in reversed(shape):
        found.append(step)
        step *= length
    return tuple(reversed(found))


def rows_of(
    shape: Sequence[int], itemsize: int, source: Place, target: Place, whole: Place, sums: int = 0
) -> list[list[int]]:
    """The rows of a block. sums: the byte of the word to which its sum is added."""
    steps = zip(source.strides, target.strides, whole.strides, strict=True)
    dims = [(n, *each) for n, each in zip(shape, steps, strict=True) if n != 1]
    if any(not n for n, *_ in dims):
        return []
    run = itemsize
    while dims and dims[-1][1:] == (run, run, run):
        run *= dims.pop()[0]
    merged: list[tuple[int, ...]] = []
    for n, *each in reversed(dims):
        if merged and all(step == merged[-1][0] * inner for step, inner in zip(each, merged[-1][1:], strict=True)):
            merged[-1] = (n * merged[-1][0], *merged[-1][1:])
        else:
            merged.append((n, *each))
    return list(_filled([source.start, target.start, run, whole.start, sums], merged[::-1]))


def _filled(head: list[int], dims: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
    """Rows with no more outer dims than they have room for."""
    if len(dims) > _OUTER:
        n, source, target, whole = dims[0]
        for i in range(n):
            inner = [head[0] + i * source, head[1] + i * target, head[2], head[3] + i * whole, head[4]]
            yield from _filled(inner, dims[1:])
        return
    yield head + [word for dim in [(1, 0, 0, 0)] * (_OUTER - len(dims)) + list(dims) for word in dim]


class Rows:
    """A table of rows. The memory that they name must be there."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.table = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)
        self.nbytes = int((self.table[:, 2] * self.table[:, 5::4].prod(axis=1)).sum())
        self._address = address_of(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def move(self, source: int, target: int, sums: int = 0, past: bool = False) -> None:
        """Copies all runs between addresses that count from these; ``sums``: of what has landed, added there.

        past: past the caches, as is best for more than they hold.
        """
        self._take(source, target, sums, bool(sums), past)

    def sum(self, source: int, sums: int) -> None:
        """Adds the sums of all runs where the source is."""
        self._take(source, -1, sums, True, False)

    def _take(self, source: int, target: int, sums: int, summing: bool, past: bool) -> None:
        if not len(self.table):
            return
        if _compiled(self.nbytes):
            weights = _WEIGHTS_AT if summing else 0
            loops.of(CHECKSUM)["moves"](self._address, len(self.table), source, target, weights, sums, int(past))
            return
        if target != -1 and (self.table[:, 5::4] == 1).all():
            for here, there, run in self.table[:, :3].tolist():
                ctypes.memmove(target + there, source + here, run)
        elif target != -1:
            for row in self.table.tolist():
                shape = (*row[5::4], row[2])
                _bytes(target + row[1], shape, row[7::4])[...] = _bytes(source + row[0], shape, row[6::4])
        for row in self.table.tolist() if summing else []:
            at, steps = (source + row[0], row[6::4]) if target == -1 else (target + row[1], row[7::4])
            word = np.ctypeslib.as_array(ctypes.c_uint64.from_address(sums + row[4]))
            word += np.uint64(_sum(_bytes(at, (*row[5::4], row[2]), steps), row[3], row[8::4]))


_taken = 0


def _compiled(nbytes: int) -> bool:
    """True if the compiled loop is there; it is asked for once enough bytes were taken without it."""
    global _taken
    mode = wanted()
    if not mode:
        return False
    if loops.kept(CHECKSUM):
        return True
    _taken += nbytes
    return (mode == 2 or _taken > _WORTH) and loops.serve(CHECKSUM, at_once=mode == 2)


def _bytes(address: int, shape: Shape, steps: Sequence[int]) -> NDArray[np.uint8]:
    """Runs, the last dim of a shape, in memory."""
    strides = (*steps, 1)
    extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def _sum(runs: NDArray[np.uint8], first: int, steps: Sequence[int]) -> int:
    """The sum of runs, in units of as many bytes as all of them are aligned to."""
    starts = np.array([first], dtype=np.int64)
    for length, step in zip(runs.shape[:-1], steps, strict=True):
        starts = (starts[:, None] + np.arange(length) * step).reshape(-1)
    inner = runs.shape[-1]
    unit = next(unit for unit in (4, 2, 1) if inner % unit == 0 and not (starts % unit).any())
    values, count = np.ascontiguousarray(runs).view(f"u{unit}").reshape(len(starts), -1), inner // unit
    total = 0
    each = max(_AT_ONCE // count, 1)
    for low in range(0, len(starts), each):
        for left in range(0, count, _AT_ONCE):
            units = np.arange(left, min(left + _AT_ONCE, count), dtype=np.int64) * unit
            at = starts[low : low + each, None] + units
            weights = WEIGHTS[(at >> 2) & (_WORDS - 1)].astype(np.uint64) << (8 * (at & 3)).astype(np.uint64)
            weights *= mixed((at >> 12).astype(np.uint64))
            total += int((values[low : low + each, left : left + _AT_ONCE] * weights).sum(dtype=np.uint64))
    return total & _MASK
