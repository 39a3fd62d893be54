"""What a rank that sends does in a movement: packs its windows, and takes the checksums of what it packs."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.transport.shared_heap import BOUNDS, place
from unisono.weights.checksum import Sums, rows_of
from unisono.weights.packing import Move, Packer, view_of
from unisono.weights.terms import PACKED, UNCHANGED, Bound, Numbers, Terms, half_of
from unisono.weights.windows import Item, Window, cut_move

if TYPE_CHECKING:
    from unisono.weights.movement import Movement

__all__ = ["Packing", "Source", "rebased"]


class Packing(NamedTuple):
    """A source's windows bound to its tensors: how each is packed, and where items lie as they are sent, else 0."""

    packers: list[Packer]
    addresses: Numbers
    some: Callable[[Window, NDArray[np.bool_]], Packer]


class Source:
    """What a rank that sends does."""

    def __init__(self, movement: "Movement", windows: list[Window], memory: Callable[..., Tensor]) -> None:
        self._movement, self.windows = movement, windows
        self.items: list[Item] = [item for window in windows for item in window.items]
        self._nbytes = np.array([item.nbytes for item in self.items], dtype=np.int64)
        self.starts = np.array([item.start for item in self.items], dtype=np.int64)
        self._itself = np.arange(len(self.items))
        self.bucket = memory(movement.slots, half_of(windows) if windows else 0, dtype=torch.uint8)
        raw = memory(len(self.items), 2, dtype=torch.int64)
        raw[:, 0], raw[:, 1] = PACKED, 0
        self.table: Numbers = raw.numpy()
        self._raw = raw
        self._bound: Bound[Packing] = Bound()
        rows: list[list[int]] = []
        owners: list[int] = []
        for window in windows:
            layout = movement.lineup.layout_of(self._targets(window)[0])
            for number, item in enumerate(window.items, window.first):
                tensor = layout[item.name]
                more = rows_of(0, item.offsets, item.shape, tensor.shape, tensor.dtype.itemsize)
                rows += more
                owners += [number] * len(more)
        self._owners: Numbers = np.array(owners, dtype=np.int64)
        self._sums = Sums(rows)
        self._inner = self._sums.rows[:, 0].copy()  # where a row's bytes lie in their item
        self._bounds = np.searchsorted(self._owners, np.arange(len(self.items) + 1))

    def places(self) -> list[int]:
        """Where the bucket and the table lie in this process's heap; -1: not there."""
        if not self.windows:
            return [-1, -1]
        table = place(self._raw.data_ptr(), self._raw.nbytes)
        return [place(self.bucket.data_ptr(), self.bucket.nbytes), table]

    def _targets(self, window: Window) -> tuple[int, ...]:
        return self._movement.plan.chunks[window.chunk].targets

    def packing(self, tensors: Mapping[str, Tensor], scales: list[dict[str, Tensor]]) -> "Packing":
        """The windows bound to tensors."""
        if any(scales):
            return self._bind(tensors, scales)
        return self._bound.of(tensors, lambda: self._bind(tensors, scales))

    def send(
        self,
        tensors: Mapping[str, Tensor],
        terms: Terms,
        compare: Any = None,
        shown: Mapping[int, int] | None = None,
    ) -> None:
        """Hands the items over.

        ``compare(checksums)``: which of them are not sent (delta). ``shown``: the published copies that ranks show.
        """
        scales = self._movement.scales(tensors)
        if self._movement.publishing is not None:
            self._movement.publishing.publish(tensors, scales, terms, shown or {})
        packing = self.packing(tensors, scales)
        self.table[:, 0] = PACKED
        if terms.tables:
            self._publish(packing, compare)
        self._movement.hand_over(self, packing, terms, compare is None)

    def finish(self, packing: "Packing") -> None:
        """Sums what the targets read where it lies."""
        self.sum(np.flatnonzero(self.table[:, 0] >= 0), packing.addresses)

    def _bind(self, tensors: Mapping[str, Tensor], scales: list[dict[str, Tensor]]) -> Packing:
        plan, lineup = self._movement.plan, self._movement.lineup
        addresses: list[int] = []
        cuts: list[list[Move]] = []
        moves, chunk = list[Move](), -1
        for window in self.windows:
            if window.chunk != chunk:
                moves, chunk = plan.moves(self._movement.rank, window.chunk), window.chunk
            cuts.append([cut_move(moves[item.piece], item) for item in window.items])
            addresses += [_address(move, tensors) for move in cuts[-1]]

        def some(window: Window, wanted: NDArray[np.bool_]) -> Packer:
            chosen = [move for move, each in zip(cuts[window.number], wanted, strict=True) if each]
            return Packer(rebased(chosen), tensors, scales[lineup.replica_of(self._targets(window)[0])])

        packers = [some(window, np.ones(len(window.items), dtype=np.bool_)) for window in self.windows]
        return Packing(packers, np.array(addresses, dtype=np.int64), some)

    def _publish(self, packing: Packing, compare: Any) -> None:
        """Writes the table as far as it goes ahead of the data."""
        table, addresses = self.table, packing.addresses
        inside = (addresses >= BOUNDS[0]) & (addresses + self._nbytes <= BOUNDS[1]) & (addresses > 0)
        table[:, 0] = np.where(inside, addresses - BOUNDS[0], PACKED)
        if compare is not None:
            self.sum_all(packing)
            table[compare(table[:, 1]), 0] = UNCHANGED

    def pack(self, window: Window, packing: Packing, bucket: Tensor, summing: bool) -> int:
        """Packs what of a window goes through the bucket, without gaps; returns how many bytes that is."""
        packed = self.table[window.first : window.stop, 0] == PACKED
        items = self._itself[window.first : window.stop]
        if packed.all():
            packing.packers[window.number].pack(bucket)
            starts, nbytes = self.starts, window.nbytes
        else:
            packer = packing.some(window, packed)
            packer.pack(bucket)
            items, nbytes = items[packed], packer.nbytes
            starts = np.zeros_like(self.starts)
            starts[items] = np.cumsum(self._nbytes[items]) - self._nbytes[items]
        if summing:
            self.sum(items, bucket.data_ptr() + starts)
        return nbytes

    def sum_all(self, packing: Packing) -> None:
        """Sums everything ahead of the data; what is not sent as it lies is packed for that."""
        addresses = packing.addresses
        self.sum(np.flatnonzero(addresses > 0), addresses)
        for window in self.windows:
            if not (addresses[window.first : window.stop] > 0).all():
                packing.packers[window.number].pack(self.bucket[0])
                items = self._itself[window.first : window.stop]
                self.sum(items, self.bucket[0].data_ptr() + self.starts)

    def sum(self, items: Numbers, addresses: Numbers) -> None:
        """Writes the checksums of items, in order, which lie at ``addresses`` (of all items), into the table."""
        for run in _runs(items):
            first, stop = int(run[0]), int(run[-1]) + 1
            low, high = int(self._bounds[first]), int(self._bounds[stop])
            owners = self._owners[low:high]
            self._sums.rows[low:high, 0] = self._inner[low:high] + addresses[owners]
            self._sums.take(low, high)
            total = np.zeros(stop - first, dtype=np.uint64)
            np.add.at(total, owners - first, self._sums.sums[low:high])
            self.table[first:stop, 1] = total.view(np.int64)


def _runs(items: Numbers) -> list[Numbers]:
    """Numbers in order, cut where some are left out."""
    if not len(items) or items[-1] - items[0] == len(items) - 1:
        return [items] if len(items) else []
    return np.split(items, np.flatnonzero(np.diff(items) != 1) + 1)


def rebased(moves: Sequence[Move]) -> list[Move]:
    """Moves that follow each other without gaps."""
    found, start = [], 0
    for move in moves:
        found.append(move if move.start == start else move._replace(start=start))
        start += move.nbytes
    return found


def _address(move: Move, tensors: Mapping[str, Tensor]) -> int:
    """Where a move's bytes lie as they are sent; 0 if nowhere."""
    if move.ops or move.name not in tensors:
        return 0
    view = view_of(move, tensors[move.name])
    plain = view.is_contiguous() and view.device.type == "cpu" and not (view.is_conj() or view.is_neg())
    return view.data_ptr() if plain else 0
