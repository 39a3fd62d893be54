"""What a rank that sends does in a movement: packs its windows, and takes the checksums of what it packs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.transport.shared_heap import BOUNDS, place
from unisono.weights.exposed import own_places, put_move, written
from unisono.weights.packing import Move, Packer, view_of
from unisono.weights.published import Place
from unisono.weights.rows import address_of
from unisono.weights.terms import PACKED, UNCHANGED, Bound, GroupFailed, Key, Numbers, Terms, half_of, table_in
from unisono.weights.windows import Item, Window, cut_move

if TYPE_CHECKING:
    from unisono.weights.movement import Movement

__all__ = ["Packing", "Source", "rebased", "words_of"]

_WORD = 8  # bytes of a place, and of a checksum


class Packing(NamedTuple):
    """A source's windows bound to its tensors: how each is packed, and where items lie as they are sent, else 0."""

    packers: list[Packer]
    addresses: Numbers
    some: Callable[[Window, NDArray[np.bool_]], Packer]
    kept: dict[int, tuple[bytes, Packer]]
    """Of windows of which only some items were wanted last: which, and their packer."""

    def of(self, window: Window, wanted: NDArray[np.bool_]) -> Packer:
        """Packs the wanted items of a window."""
        if wanted.all():
            return self.packers[window.number]
        which = wanted.tobytes()
        known = self.kept.get(window.number)
        if known is None or known[0] != which:
            known = self.kept[window.number] = which, self.some(window, wanted)
        return known[1]


class Source:
    """What a rank that sends does."""

    def __init__(self, movement: "Movement", windows: list[Window], memory: Callable[..., Tensor]) -> None:
        self._movement, self.windows = movement, windows
        self.items: list[Item] = [item for window in windows for item in window.items]
        self._nbytes = np.array([item.nbytes for item in self.items], dtype=np.int64)
        self.bucket = memory(movement.slots, half_of(windows) if windows else 0, dtype=torch.uint8)
        self._raw = memory(2 * _WORD * len(self.items), dtype=torch.uint8)
        self.table: Numbers = table_in(self._raw, 0, len(self.items))
        self.table[:, 0], self.table[:, 1] = PACKED, 0
        self._sums = np.zeros(len(self.items), dtype=np.int64)  # of a delta, before it is known what targets have
        self._bound: Bound[Packing] = Bound()
        self._putting: Bound[list[Packer]] = Bound()
        self._there: dict[tuple[int, int], Tensor] = {}  # what targets expose, by rank and file, the latest last

    def places(self) -> list[int]:
        """Where the bucket and the table lie in this process's heap; -1: not there."""
        if not self.windows:
            return [-1, -1]
        table = place(self._raw.data_ptr(), self._raw.nbytes)
        return [place(self.bucket.data_ptr(), self.bucket.nbytes), table]

    def _targets(self, window: Window) -> tuple[int, ...]:
        return self._movement.plan.chunks[window.chunk].targets

    def sums_of(self, window: Window) -> int:
        """Where the words of a window's checksums are in the table."""
        return address_of(self.table[:, 1]) + _WORD * window.first

    def packing(self, tensors: Mapping[str, Tensor], key: Key, scales: list[dict[str, Tensor]]) -> "Packing":
        """The windows bound to tensors, which ``key`` names with their memory."""
        if any(scales):
            return self._bind(tensors, scales)
        return self._bound.of(key, lambda: self._bind(tensors, scales))

    def send(
        self,
        tensors: Mapping[str, Tensor],
        key: Key,
        terms: Terms,
        compare: Any = None,
        shown: Mapping[int, int] | None = None,
    ) -> None:
        """Hands the items over. ``key``: names the tensors and their memory.

        ``compare(checksums)``: which of them are not sent (delta). ``shown``: the published copies that ranks show.
        """
        scales = self._movement.scales(tensors)
        if self._movement.publishing is not None:
            self._movement.publishing.publish(tensors, key, scales, terms, shown or {})
        if compare is None:
            self.table[:, 1] = 0
        if terms.exposed:
            self._put(tensors, key, scales, terms)
            return
        packing = self.packing(tensors, key, scales)
        self._publish(packing, terms.tables, compare)
        self._movement.hand_over(self, packing, terms, compare is None)

    def _put(
        self,
        tensors: Mapping[str, Tensor],
        key: Key,
        scales: list[dict[str, Tensor]],
        terms: Terms,
    ) -> None:
        """Writes the windows into what their targets expose."""
        movement = self._movement
        made = self._bind_puts(tensors, scales) if any(scales) else None
        packers = made or self._putting.of(key, lambda: self._bind_puts(tensors, scales))
        targets = dict.fromkeys(self._targets(window)[0] for window in self.windows)
        there = {target: self._open(target, *terms.exposed[target]) for target in targets}
        for windows in movement.puts_between:
            for window in windows[movement.rank]:
                sums = self.sums_of(window) if terms.checksum else 0
                packers[window.number].pack(there[self._targets(window)[0]], sums, movement.past)
            movement.meet(terms)

    def _bind_puts(self, tensors: Mapping[str, Tensor], scales: list[dict[str, Tensor]]) -> list[Packer]:
        """How each window gets to its place at its target."""
        plan, lineup = self._movement.plan, self._movement.lineup
        places: dict[int, dict[str, Place]] = {}
        found, mine, theirs, chunk = list[Packer](), list[Move](), list[Move](), -1
        for window in self.windows:
            target = self._targets(window)[0]
            replica = lineup.replica_of(target)
            if target not in places:
                places[target] = own_places(plan, replica, target - lineup.ranks_of(replica)[0])[0]
            if window.chunk != chunk:
                chunk = window.chunk
                mine, theirs = plan.moves(lineup.rank, chunk), plan.moves(target, chunk)
            cut = []
            for item in window.items:
                ends = cut_move(mine[item.piece], item), cut_move(theirs[item.piece], item)
                cut.append(put_move(*ends, places[target][item.name]))
            found.append(Packer(cut, tensors, scales[replica], words_of(cut)))
        return found

    def _open(self, target: int, fd: int, inode: int) -> Tensor:
        """What a target exposes; two of each target are kept."""
        memory = self._there.pop((target, inode), None)
        if memory is None:
            kept = [each for each in self._there if each[0] == target]
            for each in kept[: len(kept) - 1]:
                del self._there[each]
            try:
                memory = written(self._movement.lineup.who[target].pid, fd, inode)
            except (OSError, ValueError) as error:
                raise GroupFailed(f"the memory of rank {target} can not be mapped: {error}") from None
        self._there[target, inode] = memory
        return memory

    def finish(self, packing: "Packing") -> None:
        """Sums what the targets read where it lies."""
        for window, placed in self._some(self.table[:, 0] >= 0):
            packing.of(window, placed).sum(self.bucket[0], self.sums_of(window))

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
            chosen = np.flatnonzero(wanted).tolist()
            moves = rebased([cuts[window.number][number] for number in chosen])
            words = [_WORD * number for number in chosen]
            return Packer(moves, tensors, scales[lineup.replica_of(self._targets(window)[0])], words)

        packers = [some(window, np.ones(len(window.items), dtype=np.bool_)) for window in self.windows]
        return Packing(packers, np.array(addresses, dtype=np.int64), some, {})

    def _some(self, wanted: NDArray[np.bool_]) -> Iterator[tuple[Window, NDArray[np.bool_]]]:
        """The windows of which some items are wanted, and which."""
        for window in self.windows:
            some = wanted[window.first : window.stop]
            if some.any():
                yield window, some

    def _publish(self, packing: Packing, ahead: bool, compare: Any) -> None:
        """Writes the table as far as it goes ``ahead`` of the data."""
        places, addresses = np.full(len(self.items), PACKED), packing.addresses
        if ahead:
            inside = (addresses >= BOUNDS[0]) & (addresses + self._nbytes <= BOUNDS[1]) & (addresses > 0)
            places = np.where(inside, addresses - BOUNDS[0], PACKED)
        if compare is not None:
            self._sums[:] = 0
            self.sum_all(packing, self._sums)
            places[compare(self._sums)] = UNCHANGED
            _renew(self.table[:, 1], self._sums)
        _renew(self.table[:, 0], places)

    def pack(self, window: Window, packing: Packing, bucket: Tensor, summing: bool) -> int:
        """Packs what of a window goes through the bucket, without gaps; returns how many bytes that is."""
        packer = packing.of(window, self.table[window.first : window.stop, 0] == PACKED)
        packer.pack(bucket, self.sums_of(window) if summing else 0, self._movement.past)
        return packer.nbytes

    def sum_all(self, packing: Packing, sums: Numbers) -> None:
        """Sums everything ahead of the data; what can not be summed where it lies is packed for that."""
        for window in self.windows:
            packing.packers[window.number].sum(self.bucket[0], address_of(sums) + _WORD * window.first)


def _renew(column: Numbers, values: Numbers) -> None:
    """Writes what is new: what targets have read of the rest stays in their caches."""
    new = np.flatnonzero(column != values)
    column[new] = values[new]


def words_of(items: Sequence[object]) -> list[int]:
    """The bytes of items' checksums in the table, from the first one's on."""
    return [_WORD * number for number in range(len(items))]


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
