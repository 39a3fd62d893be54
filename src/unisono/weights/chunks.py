"""From fits to chunks: what every receiving rank needs, which rank it comes from, cut into chunks of at most a bucket.

A *block* is a box of a receiver's tensor that has one set of holders among the senders and one set of targets. Blocks
with the same holders and targets are dealt to the holders so that their loads even out, then filled into chunks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from unisono.weights.fit import Fit
from unisono.weights.layout import Layout, Part
from unisono.weights.regions import Bounds, Region, Value, clipped, seen

__all__ = ["Chunk", "Demand", "Piece", "chunks_of", "demand_of"]

Shape = tuple[int, ...]
Ranks = tuple[int, ...]
_SHARED = 1 << 16  # bytes that are not worth dividing among holders
_FINE = 512  # bytes of a block that is not cut to even out their loads


class Piece(NamedTuple):
    """A box of a receiver's tensor: its name, offsets in the whole, shape."""

    name: str
    offsets: Shape
    shape: Shape


class Chunk(NamedTuple):
    """Bytes with one source and one set of targets (ranks; senders are numbered first).

    The pieces follow each other without gaps, each in the order of the receiver's dims, larger dtypes first.
    """

    nbytes: int
    source: int
    targets: Ranks
    pieces: tuple[Piece, ...]


class _Block(NamedTuple):
    name: str
    offsets: Shape
    shape: Shape
    itemsize: int
    nbytes: int

    def cut(self, room: int) -> "tuple[_Block, _Block] | None":
        """The first elements, as many as fit into `room` bytes along the first dim that can be cut, and the others."""
        dim = next((i for i, length in enumerate(self.shape) if length > 1), None)
        if dim is None:
            return None
        length = self.shape[dim]
        count = min(room * length // self.nbytes, length)
        if not 0 < count < length:
            return None
        return self._along(dim, 0, count), self._along(dim, count, length - count)

    def _along(self, dim: int, start: int, length: int) -> "_Block":
        offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return _Block(self.name, offsets, shape, self.itemsize, self.itemsize * prod(shape))

    def within(self, limit: int) -> "Iterator[_Block]":
        """The block in blocks of at most `limit` bytes (or one element)."""
        if self.nbytes <= limit or prod(self.shape) == 1:
            yield self
            return
        dim = next(i for i, length in enumerate(self.shape) if length > 1)
        each = max(limit * self.shape[dim] // self.nbytes, 1)
        for start in range(0, self.shape[dim], each):
            block = self._along(dim, start, min(each, self.shape[dim] - start))
            yield from block.within(limit)


Demand = dict[tuple[Ranks, Ranks], list[_Block]]


def demand_of(sender: Layout, receivers: Sequence[Layout], fits: Sequence[Fit]) -> Demand:
    """What must be moved: blocks by who holds them and who needs them."""
    demand: Demand = {}
    scales = {key for fit in fits for key in fit.scales}
    for name, value, targets in _needs(sender.world_size, receivers, fits):
        itemsize = value.dtype.itemsize
        for offsets, shape, source, at, dims, _ in value.regions:
            held = None if source in scales else sender[source].parts
            region = Region(offsets, shape, "", at, dims)
            for holders, ranks, start, lengths in _blocks(region, held, targets, sender.world_size):
                block = _Block(name, start, lengths, itemsize, itemsize * prod(lengths))
                demand.setdefault((holders, ranks), []).append(block)
    return demand


def chunks_of(demand: Demand, senders: int, bucket: int, weight: Callable[[int], int]) -> list[Chunk]:
    """The chunks of an update from so many senders. weight: how often a chunk for so many targets leaves its source."""
    streams: dict[tuple[int, Ranks], list[_Block]] = {}
    loads = [0] * senders
    for (holders, ranks), blocks in sorted(demand.items(), key=lambda item: len(item[0][0])):
        small = [part for block in blocks for part in block.within(bucket)]
        for source, dealt in _dealt(small, holders, loads, weight(len(ranks)), bucket):
            streams.setdefault((source, ranks), []).extend(dealt)
    return [
        Chunk(sum(b.nbytes for b in blocks), source, ranks, tuple(Piece(*b[:3]) for b in blocks))
        for (source, ranks), stream in sorted(streams.items())
        for blocks in _filled(stream, bucket)
    ]


Targets = tuple[tuple[int, Part], ...]


def _needs(senders: int, receivers: Sequence[Layout], fits: Sequence[Fit]) -> Iterator[tuple[str, Value, Targets]]:
    """Every tensor that is needed, with the ranks that hold parts of it; replicas that fit alike share one entry."""
    needs: dict[tuple[str, Value], list[tuple[int, Part]]] = {}
    base = senders
    for receiver, fit in zip(receivers, fits, strict=True):
        for name, value in fit.tensors.items():
            held = [(base + rank, part) for rank, part in enumerate(receiver[name].parts) if part]
            needs.setdefault((name, value), []).extend(held)
        base += receiver.world_size
    for (name, value), targets in needs.items():
        yield name, value, tuple(targets)


@lru_cache(maxsize=4096)
def _blocks(
    region: Region, held: tuple[Part, ...] | None, targets: Targets, senders: int
) -> tuple[tuple[Ranks, Ranks, Shape, Shape], ...]:
    """The region cut where any holder's or target's box begins or ends: (holders, targets, offsets, shape).

    held: the senders' parts of its source; None: all of them hold it whole.
    """
    everyone = tuple(range(senders))
    holding = [(rank, seen(region, box.offsets, box.shape)) for rank, part in enumerate(held or ()) for box in part]
    wanted = [(rank, clipped(region, box.offsets, box.shape)) for rank, part in targets for box in part]
    boxes = [box for _, box in (*holding, *wanted) if box is not None]
    edges = []
    for dim, (offset, length) in enumerate(zip(region.offsets, region.shape, strict=True)):
        inner = {edge for low, high in boxes for edge in (low[dim], high[dim])}
        edges.append(sorted({offset, offset + length, *inner}))
    found = []
    for cell in product(*(list(pairwise(e)) for e in edges)):
        ranks = _around(cell, wanted)
        holders = everyone if held is None else _around(cell, holding)
        if ranks and holders:
            found.append((holders, ranks, tuple(a for a, _ in cell), tuple(b - a for a, b in cell)))
    return tuple(found)


def _around(cell: Sequence[tuple[int, int]], boxes: Sequence[tuple[int, Bounds | None]]) -> Ranks:
    """The ranks, in order, of which a box contains the cell."""
    found = dict.fromkeys(
        rank
        for rank, box in boxes
        if box is not None
        and all(low <= a and b <= high for (a, b), low, high in zip(cell, box[0], box[1], strict=True))
    )
    return tuple(sorted(found))


def _dealt(
    blocks: Sequence[_Block], holders: Ranks, loads: list[int], weight: int, bucket: int
) -> Iterator[tuple[int, list[_Block]]]:
    """Blocks by holder, so that the loads (bytes sent so far, which grow) end as even as they can."""
    total = sum(block.nbytes for block in blocks)
    grain = min(bucket, _SHARED)
    busy = sorted(holders, key=lambda rank: (loads[rank], rank))[: max(1, -(-total // grain))]
    quotas = _quotas([loads[rank] for rank in busy], total * weight)
    left = list(reversed(blocks))
    for i, (rank, quota) in enumerate(zip(busy, quotas, strict=True)):
        room, mine = total if i == len(busy) - 1 else round(quota / weight), list[_Block]()
        while left and room > 0:
            block = left.pop()
            halves = block.cut(room) if block.nbytes > room and block.nbytes > _FINE else None
            if halves is not None:
                block = halves[0]
                left.append(halves[1])
            elif block.nbytes > 2 * room:
                left.append(block)
                break
            mine.append(block)
            room -= block.nbytes
        loads[rank] += sum(block.nbytes for block in mine) * weight
        if mine:
            yield rank, mine


def _quotas(loads: Sequence[int], total: int) -> list[float]:
    """What each of some loads, in ascending order, gets of a total so that they end as even as they can."""
    count = len(loads)
    while count > 1 and sum(loads[count - 1] - load for load in loads[:count]) >= total:
        count -= 1
    level = (sum(loads[:count]) + total) / count
    return [max(level - load, 0.0) if i < count else 0.0 for i, load in enumerate(loads)]


def _filled(stream: Sequence[_Block], bucket: int) -> Iterator[list[_Block]]:
    """Blocks in groups of at most a bucket; larger dtypes first, so that each lies where its dtype may."""
    group: list[_Block] = []
    room = bucket
    left = sorted(stream, key=lambda block: -block.itemsize)[::-1]
    while left:
        block = left.pop()
        if block.nbytes > room:
            halves = block.cut(room) if block.nbytes > bucket // 4 else None
            if halves is not None:
                group.append(halves[0])
                left.append(halves[1])
            else:
                left.append(block)
            if group:
                yield group
                group, room = [], bucket
                continue
            left.pop()
        group.append(block)
        room -= block.nbytes
    if group:
        yield group
