"""How the ranks of a line-up make, and find, the copies for mapped replicas (published.py)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.weights.checksum import whole_place
from unisono.weights.packing import Move, Packer
from unisono.weights.published import Copies, File
from unisono.weights.published import Place as PlaceInFile
from unisono.weights.rows import Place, Rows, address_of, contiguous, rows_of
from unisono.weights.source import Source, words_of
from unisono.weights.terms import Bound, GroupFailed, Key, Numbers, Terms, call, rounds, table_in
from unisono.weights.windows import Window, cut_move

if TYPE_CHECKING:
    from unisono.weights.movement import Movement

__all__ = ["Publishing"]


class Publishing:
    """The copies for mapped replicas (published.py), as all ranks of a line-up make and find them."""

    def __init__(self, movement: "Movement", windows: list[list[Window]]) -> None:
        self._movement, self._windows = movement, windows
        lineup = movement.lineup
        self.source = Source(movement, windows[movement.rank], movement.memory) if lineup.sends else None
        self.tables: dict[int, Numbers] = {}
        self._kinds = [
            number for number in sorted(lineup.mapped) if lineup.kind_of(number) == number
        ]  # a replica of each kind of those that are mapped
        self._copies = {number: Copies(movement.plan.fits[number]) for number in self._kinds}
        self._bound: Bound[list[tuple[Window, int, Packer, bool]]] = Bound()
        self._rounds = rounds(windows, movement.oversubscribed)
        self._summed: list[Rows] = []

    def map(self, source: int, heap: Tensor | None, table: int) -> bool:
        """Maps a source's table; False if that can not be."""
        windows = self._windows[source]
        if windows and self._movement.rank == source and self.source is not None:
            self.tables[source] = self.source.table
        elif windows:
            if heap is None or table < 0:
                return False
            self.tables[source] = table_in(heap, table, windows[-1].stop)
        return True

    def publish(
        self, tensors: Mapping[str, Tensor], key: Key, scales: Any, terms: Terms, shown: Mapping[int, int]
    ) -> None:
        """At a sender: writes its parts of the copies, and sums them on the way. ``key``: as for `Source.packing`."""
        movement, source = self._movement, self.source
        assert source is not None
        files = self._files(shown)
        source.table[:, 1] = 0
        if any(scales):
            packers = self._bind(tensors, scales)
        else:
            packers = self._bound.of(key, lambda: self._bind(tensors, scales))
        for each in self._rounds:
            for window, kind, packer, first in packers:
                if window.number in each:
                    sums = source.sums_of(window) if first and terms.checksum else 0
                    packer.pack(files[kind].bytes, sums, movement.past)
            movement.meet(terms)

    def _bind(self, tensors: Mapping[str, Tensor], scales: Any) -> "list[tuple[Window, int, Packer, bool]]":
        """How each window gets into the copy of each kind of its replicas; of each window one is the first."""
        movement, source = self._movement, self.source
        lineup = movement.lineup
        assert source is not None
        found, moves, chunk = [], list[Move](), -1
        for window in source.windows:
            if window.chunk != chunk:
                moves, chunk = movement.plan.moves(lineup.rank, window.chunk), window.chunk
            kinds = sorted({lineup.kind_of(replica) for replica in self._mapped_targets(window)})
            for kind in kinds:
                places = self._copies[kind].places
                cut = [_published(cut_move(moves[item.piece], item), places[item.name]) for item in window.items]
                found.append((window, kind, Packer(cut, tensors, scales[kind], words_of(cut)), kind == kinds[0]))
        return found

    def _mapped_targets(self, window: Window) -> set[int]:
        lineup = self._movement.lineup
        replicas = {lineup.replica_of(target) for target in self._movement.plan.chunks[window.chunk].targets}
        return replicas & lineup.mapped

    def _files(self, shown: Mapping[int, int]) -> dict[int, File]:
        """This update's files by kind; collective."""
        movement, lineup = self._movement, self._movement.lineup
        places = torch.zeros(2 * len(self._kinds), dtype=torch.int64)
        if movement.rank == 0:
            for at, kind in enumerate(self._kinds):
                ranks = [r for n in lineup.mapped if lineup.kind_of(n) == kind for r in lineup.ranks_of(n)]
                made = self._copies[kind].next(ranks, shown)
                places[2 * at], places[2 * at + 1] = made.fd, made.nonce
        everyone = [torch.empty_like(places) for _ in lineup.who]
        call(movement.group, "gather", everyone, places)
        found = {}
        for at, kind in enumerate(self._kinds):
            fd, nonce = everyone[0][2 * at : 2 * at + 2].tolist()
            if movement.rank == 0:
                found[kind] = self._copies[kind].made(nonce)
            elif lineup.sends or (lineup.replica in lineup.mapped and lineup.kind_of(lineup.replica) == kind):
                try:
                    found[kind] = self._copies[kind].open(lineup.who[0], fd, nonce, lineup.sends)
                except (OSError, ValueError) as error:
                    raise GroupFailed(f"the published copy can not be mapped: {error}") from None
        return found

    def attend(self, terms: Terms) -> None:
        """At a replica that is not mapped: meets the others."""
        self._files({})
        for _ in self._rounds:
            self._movement.meet(terms)

    def fetch(self, terms: Terms, numbers: Mapping[str, int], found: NDArray[np.uint64]) -> File:
        """At a mapped replica: its copy. Adds the checksums of some tensors to words of ``found``, as they come."""
        file = self._files({}).get(self._kind)
        assert file is not None
        for number in range(len(self._rounds)):
            self._movement.meet(terms)
            if numbers:
                self.sum(self._copies[self._kind].made(file.nonce), numbers, found, [number])
        return file

    @property
    def places(self) -> dict[str, PlaceInFile]:
        """At a mapped replica: where its tensors lie in a copy."""
        return self._copies[self._kind].places

    def sum(
        self, file: File, numbers: Mapping[str, int], found: NDArray[np.uint64], come: Sequence[int] | None = None
    ) -> None:
        """At a mapped replica: adds the checksums of some tensors of a copy to words of ``found``, by number.

        come: of those that are whole with these rounds; None: of all.
        """
        if not self._summed:
            last = {
                name: number
                for number, each in enumerate(self._rounds)
                for windows in self._windows
                for window in windows[each.start : each.stop]
                for name in window.names
            }
            rows: list[list[list[int]]] = [[] for _ in self._rounds]
            for name, number in numbers.items():
                start, shape, dtype = self._copies[self._kind].places[name]
                steps, size = contiguous(shape, dtype.itemsize), dtype.itemsize
                blocks = rows_of(shape, size, Place(start, steps), Place(0, steps), Place(0, steps), 8 * number)
                if blocks:
                    rows[last[name]] += blocks
            self._summed = [Rows(each) for each in rows]
        for number in range(len(self._rounds)) if come is None else come:
            self._summed[number].sum(file.bytes.data_ptr(), address_of(found))

    @property
    def _kind(self) -> int:
        """The kind of this mapped replica."""
        return self._movement.lineup.kind_of(self._movement.lineup.replica)

    def own_share(self) -> tuple[int, int]:
        """This rank's number among those that share its copy, and how many they are."""
        lineup = self._movement.lineup
        kind = lineup.kind_of(lineup.replica)
        ranks = [rank for n in sorted(lineup.mapped) if lineup.kind_of(n) == kind for rank in lineup.ranks_of(n)]
        return ranks.index(lineup.rank), len(ranks)

    def items(self) -> list[tuple[int, Window]]:
        """The windows of all sources."""
        return [(source, window) for source, windows in enumerate(self._windows) for window in windows]

    def close(self) -> None:
        """Lets the copies go."""
        for copies in self._copies.values():
            copies.close()


def _published(move: Move, place: PlaceInFile) -> Move:
    """A move into the copy of whole tensors."""
    size = move.dtype.itemsize
    start, strides = whole_place(move.offsets, move.whole, size)
    return move._replace(start=place.start + start, strides=strides)
