"""Checksums of tensors: 64 bits that depend on position and add up from shards, whatever their cut.

The bytes of the whole tensor, in the order of its dims, are words of 4 bytes, and those are blocks of 1024 words:

    sum over blocks b of mixed(b) * (sum over words w of the block: word * weight(w)), modulo 2**64

weight(w) is one of 1024 different odd 32-bit numbers, mixed(b) an odd 64-bit one. A word times an odd number is never
0 modulo 2**64 unless the word is, so a change of any one word is found, and so is an exchange of two of a block. Every
byte has a weight of its own (256**k times that of its word), so any bytes of the whole have a sum, and sums add up.

The loop is compiled where there is numba (runtime/checksum_loop.py): 34 MB take half of the time of their copy, less
while they are in the cache. Elsewhere NumPy computes the same.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unisono.runtime.loops import CHECKSUM, loops, wanted
from unisono.weights.layout import Layout

__all__ = ["Block", "Checker", "Sums", "checksum", "own_blocks", "rows_of", "show_checksum"]

Shape = tuple[int, ...]
_WORDS, _COLUMNS, _OUTER = 1024, 11, 4
_CACHED = 1 << 20  # bytes of a row
_AT_ONCE = 1 << 16  # elements that NumPy looks at together
_WORTH = 8 << 20  # bytes that NumPy sums before the loop is compiled
_MASK = (1 << 64) - 1


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """An odd 64-bit number for each: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1))


_WEIGHTS = ((_mixed(np.arange(1 << 20, (1 << 20) + _WORDS, dtype=np.uint64)) >> np.uint64(32)) | np.uint64(1)).astype(
    np.uint32
)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


_WEIGHTS_AT = _address(_WEIGHTS)


class Block(NamedTuple):
    """A block of a named tensor: its memory, its offsets in the whole, and the shape of the whole."""

    name: str
    tensor: Tensor
    offsets: Shape
    whole: Shape


def own_blocks(layout: Layout, rank: int, tensors: "dict[str, Tensor]") -> Iterator[Block]:
    """The boxes that a rank holds, of those of its tensors that are given."""
    for name, tensor in tensors.items():
        for offsets, shape, at in layout[name].parts[rank]:
            view = tensor
            for dim, (start, length) in enumerate(zip(at, shape, strict=True)):
                if length != view.shape[dim]:
                    view = view.narrow(dim, start, length)
            yield Block(name, view, offsets, layout[name].shape)


def checksum(tensor: Tensor, offsets: Shape | None = None, whole: Shape | None = None) -> int:
    """The checksum of a tensor, 0 <= value < 2**64; with offsets and whole, its share of that of a whole tensor."""
    shape = tuple(tensor.shape)
    block = Block("", tensor, (0,) * len(shape) if offsets is None else offsets, shape if whole is None else whole)
    return Checker([block]).sums()[""]


def show_checksum(value: int) -> str:
    """16 hexadecimal digits."""
    return f"{value & _MASK:016x}"


class Checker:
    """Checksums of blocks that stay where they are, those of one name added up.

    Strided blocks, and those of other devices, are copied each time.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._numbers: dict[str, int] = {}
        self._kept: list[Tensor] = []
        self._copied: list[tuple[int, Block]] = []
        rows: list[list[int]] = []
        owners: list[int] = []
        ends: list[int] = []
        end = 0
        for block in blocks:
            number, tensor = self._numbers.setdefault(block.name, len(self._numbers)), block.tensor
            end += tensor.numel() * tensor.itemsize
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                self._copied.append((number, block))
                continue
            self._kept.append(tensor)
            more = rows_of(tensor.data_ptr(), block.offsets, tensor.shape, block.whole, tensor.itemsize, _CACHED)
            rows += more
            owners += [number] * len(more)
            ends += _ends(more, end)
        self._table = Sums(rows)
        self._owners, self._ends = np.array(owners, dtype=np.int64), ends
        self._done = 0

    def until(self, nbytes: int) -> None:
        """Take the sums of what lies within the first bytes of all blocks, in order: they are in place now."""
        stop = bisect_right(self._ends, nbytes, self._done)
        if stop > self._done:
            self._table.take(self._done, stop)
            self._done = stop

    def sums(self) -> dict[str, int]:
        """The sum of each name: of what the blocks hold now, or held when `until` took it. The next begins anew."""
        if self._ends:
            self.until(self._ends[-1])
        self._done = 0
        added = np.zeros(len(self._numbers), dtype=np.uint64)
        np.add.at(added, self._owners, self._table.sums)
        total = added.tolist()
        for number, (_, tensor, offsets, whole) in self._copied:
            copy = tensor.detach().to("cpu").contiguous()
            rows = rows_of(copy.data_ptr(), offsets, copy.shape, whole, copy.itemsize)
            table = Sums(rows)
            table.take(0, len(rows))
            total[number] = (total[number] + sum(table.sums.tolist())) & _MASK
        return dict(zip(self._numbers, total, strict=True))


def rows_of(
    address: int,
    offsets: Sequence[int],
    shape: Sequence[int],
    whole: Sequence[int],
    itemsize: int,
    limit: int = 1 << 62,
) -> list[list[int]]:
    """Rows of the loop for a contiguous block: runs of bytes that follow each other in the whole, in up to four dims.

    limit: bytes of a row, about; longer ones are cut.
    """
    if not prod(shape):
        return []
    strides = [itemsize * prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    inner, dims = itemsize, list[tuple[int, int]]()
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if not dims and stride == inner:
            inner *= length
        elif length > 1 and dims and stride == dims[0][0] * dims[0][1]:
            dims[0] = dims[0][0] * length, dims[0][1]
        elif length > 1:
            dims.insert(0, (length, stride))
    return list(_cut_rows(address, first, inner, dims, limit))


def _cut_rows(address: int, first: int, inner: int, dims: list[tuple[int, int]], limit: int) -> Iterator[list[int]]:
    """Rows of at most `limit` bytes, or one run, with at most four dims."""
    nbytes = inner * prod(length for length, _ in dims)
    if not dims:
        for start in range(0, inner, limit):
            yield [address + start, min(limit, inner - start), first + start, *(1, 0) * _OUTER]
        return
    length, stride = dims[0]
    each = length if nbytes <= limit else max(1, limit * length // nbytes)
    if len(dims) > _OUTER or (each == 1 and length > 1):
        for i in range(length):
            yield from _cut_rows(address + i * (nbytes // length), first + i * stride, inner, dims[1:], limit)
        return
    for start in range(0, length, each):
        outer = [(min(each, length - start), stride), *dims[1:]]
        filled = [word for dim in [(1, 0)] * (_OUTER - len(outer)) + outer for word in dim]
        yield [address + start * (nbytes // length), inner, first + start * stride, *filled]


def _ends(rows: Sequence[Sequence[int]], end: int) -> list[int]:
    """Where each of some rows that follow each other ends, the last of them at `end`."""
    sizes = [row[1] * row[3] * row[5] * row[7] * row[9] for row in rows]
    return [end - sum(sizes) + stop for stop in accumulate(sizes)]


_summed = 0


class Sums:
    """Rows of the loop and their sums. The memory that the rows name must be there."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)
        self.sums = np.zeros(len(rows), dtype=np.uint64)
        self.nbytes = int((self.rows[:, 1] * self.rows[:, 3:10:2].prod(axis=1)).sum())
        self._addresses = _address(self.rows), _address(self.sums)

    def take(self, first: int, stop: int) -> None:
        """Sum rows first .. stop-1."""
        if _compiled(self.nbytes):
            rows, sums = self._addresses
            loops.of(CHECKSUM)["sums"](rows + 8 * _COLUMNS * first, stop - first, _WEIGHTS_AT, sums + 8 * first)
            return
        for number, row in enumerate(self.rows[first:stop].tolist(), first):
            self.sums[number] = _sum_of_row(row)


def _compiled(nbytes: int) -> bool:
    """True if the compiled loop is there; it is asked for once enough bytes were summed without it."""
    global _summed
    mode = wanted()
    if not mode:
        return False
    if loops.kept(CHECKSUM):
        return True
    _summed += nbytes
    return (mode == 2 or _summed > _WORTH) and loops.serve(CHECKSUM, at_once=mode == 2)


def _sum_of_row(row: Sequence[int]) -> int:
    """One row by NumPy, in units of as many bytes as all runs are aligned to."""
    address, inner, first, *dims = row
    starts = np.array([first], dtype=np.int64)
    for length, stride in zip(dims[::2], dims[1::2], strict=True):
        starts = (starts[:, None] + np.arange(length) * stride).reshape(-1)
    unit = next(unit for unit in (4, 2, 1) if inner % unit == 0 and not (starts % unit).any())
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (inner * len(starts))).from_address(address))
    values, count = raw.view(f"u{unit}").reshape(len(starts), -1), inner // unit
    total = 0
    each = max(_AT_ONCE // count, 1)
    for low in range(0, len(starts), each):
        for left in range(0, count, _AT_ONCE):
            units = np.arange(left, min(left + _AT_ONCE, count), dtype=np.int64) * unit
            at = starts[low : low + each, None] + units
            weights = _WEIGHTS[(at >> 2) & (_WORDS - 1)].astype(np.uint64) << (8 * (at & 3)).astype(np.uint64)
            weights *= _mixed((at >> 12).astype(np.uint64))
            total += int((values[low : low + each, left : left + _AT_ONCE] * weights).sum(dtype=np.uint64))
    return total & _MASK
