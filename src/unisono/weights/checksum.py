"""Checksums of tensors: 64 bits that depend on position and add up from shards, whatever their cut.

The bytes of the whole tensor, in the order of its dims, are words of 4 bytes, and those are blocks of 1024 words:

    sum over blocks b of mixed(b) * (sum over words w of the block: word * weight(w)), modulo 2**64

weight(w) is one of 1024 different odd 32-bit numbers, mixed(b) an odd 64-bit one. A word times an odd number is never
0 modulo 2**64 unless the word is, so a change of any one word is found, and so is an exchange of two of a block. Every
byte has a weight of its own (256**k times that of its word), so any bytes of the whole have a sum, and sums add up.

What moves is summed in the pass that copies it (rows.py): a sixth of the time of a copy from memory, part of which the
copy waits for anyway.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from unisono.weights.layout import Layout
from unisono.weights.rows import Place, Rows, address_of, contiguous, rows_of

__all__ = ["Block", "Checker", "checksum", "own_blocks", "show_checksum"]

Shape = tuple[int, ...]
_MASK = (1 << 64) - 1


class Block(NamedTuple):
    """A block of a named tensor: its memory, its offsets in the whole, and the shape of the whole."""

    name: str
    tensor: Tensor
    offsets: Shape
    whole: Shape

    def rows(self, sums: int, tensor: Tensor | None = None) -> list[list[int]]:
        """Rows that sum it where it lies, or a copy of it."""
        here = self.tensor if tensor is None else tensor
        steps = tuple(here.itemsize * step for step in here.stride())
        whole = whole_place(self.offsets, self.whole, here.itemsize)
        return rows_of(here.shape, here.itemsize, Place(here.data_ptr(), steps), whole, whole, sums)


def whole_place(offsets: Shape, whole: Shape, itemsize: int) -> Place:
    """Where a block begins in its whole tensor, and the strides of that."""
    steps = contiguous(whole, itemsize)
    return Place(sum(offset * step for offset, step in zip(offsets, steps, strict=True)), steps)


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

    Strided blocks, and those of other devices, are copied each time. numbers: of the words for `add`, by name.
    """

    def __init__(self, blocks: Iterable[Block], numbers: Mapping[str, int] | None = None) -> None:
        self._numbers: dict[str, int] = dict(numbers or {})
        self._kept: list[Tensor] = []
        self._copied: list[tuple[int, Block]] = []
        rows: list[list[int]] = []
        for block in blocks:
            number, tensor = self._numbers.setdefault(block.name, len(self._numbers)), block.tensor
            plain = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
            if not (plain and tensor.is_contiguous()):
                self._copied.append((number, block))
                continue
            self._kept.append(tensor)
            rows += block.rows(8 * number)
        self._rows = Rows(rows)

    def sums(self) -> dict[str, int]:
        """The sum of each name, of what the blocks hold now."""
        total = np.zeros(len(self._numbers), dtype=np.uint64)
        self.add(address_of(total))
        return dict(zip(self._numbers, total.tolist(), strict=True))

    def add(self, sums: int) -> None:
        """Adds the sum of each name to its word of those that begin at an address."""
        self._rows.sum(0, sums)
        for number, block in self._copied:
            copy = block.tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            Rows(block.rows(8 * number, copy)).sum(0, sums)
