"""Windows: parts of chunks, small enough for a cache, in which one host's ranks hand over what a plan moves.

Each source has a *bucket* of several parts that its targets read where they lie. It packs window k + 1 into one part
while they read window k from another; one meeting of all ranks divides the two.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from unisono.weights.chunks import Chunk, Piece
from unisono.weights.layout import Layout
from unisono.weights.packing import Move
from unisono.weights.plan import Plan
from unisono.weights.regions import Quantize

__all__ = ["WINDOW", "Item", "Window", "cut_move", "windows_of"]

Shape = tuple[int, ...]
WINDOW = 1 << 20
"""Bytes of a window: half of a core's cache, so that what was copied is still there when it is summed."""


class Item(NamedTuple):
    """A box of a receiver's tensor in a window: `inner` is where it lies in the `piece`-th of its chunk."""

    name: str
    offsets: Shape
    shape: Shape
    start: int
    nbytes: int
    piece: int
    inner: Shape


class Window(NamedTuple):
    """Items of one chunk that move together: the `number`-th window of its source, whose items before are `first`."""

    number: int
    chunk: int
    first: int
    nbytes: int
    items: tuple[Item, ...]

    @property
    def stop(self) -> int:
        """The number of items of this source up to here."""
        return self.first + len(self.items)

    @property
    def names(self) -> dict[str, None]:
        """The names that it has items of."""
        return dict.fromkeys(item.name for item in self.items)


def _boxes(shape: Shape, itemsize: int, limit: int) -> list[tuple[Shape, Shape]]:
    """Boxes of at most `limit` bytes, or one element, whose bytes follow each other: offsets and shapes."""
    zero = (0,) * len(shape)
    if prod(shape) * itemsize <= limit:
        return [(zero, shape)]
    dim = next((i for i, length in enumerate(shape) if length > 1), None)
    if dim is None:
        return [(zero, shape)]
    each = max(limit // (prod(shape[dim + 1 :]) * itemsize), 1)
    found = []
    for start in range(0, shape[dim], each):
        part = (*shape[:dim], min(each, shape[dim] - start), *shape[dim + 1 :])
        for offsets, inner in _boxes(part, itemsize, limit):
            found.append(((*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), inner))
    return found


def windows_of(
    plan: Plan, layout_of: Callable[[int], Layout], source: int, limit: int, wanted: Callable[[Chunk], bool]
) -> list[Window]:
    """The windows of a source's ``wanted`` chunks, in order; ``layout_of`` a target is its replica's."""
    windows: list[Window] = []
    count = 0
    for number, chunk in enumerate(plan.chunks):
        if chunk.source != source or not wanted(chunk):
            continue
        items: list[Item] = []
        room = 0
        for at, piece in enumerate(chunk.pieces):
            for item in _items(layout_of(chunk.targets[0]), at, piece, limit):
                if items and room + item.nbytes > limit:
                    windows.append(Window(len(windows), number, count, room, tuple(items)))
                    count, items, room = count + len(items), [], 0
                items.append(item._replace(start=room))
                room += item.nbytes
        if items:
            windows.append(Window(len(windows), number, count, room, tuple(items)))
            count += len(items)
    return windows


def _items(layout: Layout, at: int, piece: Piece, limit: int) -> list[Item]:
    itemsize = layout[piece.name].dtype.itemsize
    return [
        Item(
            piece.name,
            tuple(a + b for a, b in zip(piece.offsets, inner, strict=True)),
            shape,
            0,
            prod(shape) * itemsize,
            at,
            inner,
        )
        for inner, shape in _boxes(piece.shape, itemsize, limit)
    ]


def cut_move(move: Move, item: Item) -> Move:
    """The part of a chunk's move that an item is, as it lies in its window."""
    at = list(move.at)
    for i, dim in enumerate(move.dims):
        at[dim] += item.inner[i]
    ops = tuple(
        op._replace(start=op.start + item.inner[op.axis]) if isinstance(op, Quantize) and op.axis is not None else op
        for op in move.ops
    )
    return move._replace(start=item.start, shape=item.shape, at=tuple(at), ops=ops, offsets=item.offsets)
