"""What a rank that receives does in a movement: reads its items where they lie, loads whole tensors, sums them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.weights.checksum import Checker, own_blocks
from unisono.weights.movement import Movement
from unisono.weights.packing import Move, Unpacker
from unisono.weights.source import rebased
from unisono.weights.terms import PACKED, UNCHANGED, Bound, Terms
from unisono.weights.windows import Window, cut_move

__all__ = ["Arrival", "Target"]

Key = tuple[int, int]  # a source and the number of its window


class Arrival(NamedTuple):
    """What came: names that were loaded, others that were unchanged, their bytes, and what a checksum did not fit.

    ``nbytes``: of the tensors loaded; ``moved``: from process to process.
    """

    loaded: list[str]
    skipped: list[str]
    nbytes: int
    moved: int
    wrong: list[tuple[str, int, int]]
    """Name, the checksum that was sent, that of what came."""


class Binding(NamedTuple):
    """The windows bound to the memory in which they land."""

    unpackers: dict[Key, Unpacker]
    checkers: dict[Key, Checker]


class Target:
    """What a rank that receives does in a line-up."""

    def __init__(self, movement: Movement) -> None:
        self._movement = movement
        lineup, plan, rank = movement.lineup, movement.plan, movement.rank
        self.names = list(plan.fits[lineup.replica].tensors)
        """The replica's tensors that arrive, on whichever of its ranks."""
        self.ties = plan.fits[lineup.replica].ties
        self.layout = plan.receivers[lineup.replica]
        self.own = lineup.own
        self._nbytes = {name: self.layout[name].nbytes_of(self.own) for name in self.names}
        self.number = {name: number for number, name in enumerate(self.names)}
        self._moves: dict[Key, list[Move]] = {}
        self.windows = {
            (source, window.number): window
            for source, windows in enumerate(movement.windows)
            for window in windows
            if rank in plan.chunks[window.chunk].targets and lineup.replica not in lineup.mapped
        }
        self.order = list(dict.fromkeys(name for w in self.in_order(movement.windows) for name in w[1].names))
        """This rank's tensors in the order in which they arrive."""
        first = {
            number for number, chunk in enumerate(plan.chunks) if rank in lineup.firsts(chunk.targets)
        }  # whose checksums this rank reports for its replica
        if lineup.replica in lineup.mapped:
            self.order = list(self.names)
        publishing = movement.publishing if lineup.replica in lineup.mapped else None
        self._tables = movement.tables if publishing is None else publishing.tables
        windows = [(key[0], w) for key, w in self.windows.items()] if publishing is None else publishing.items()
        self._items = [
            (source, w, np.array([self.number[item.name] for item in w.items], dtype=np.int64), w.chunk in first)
            for source, w in windows
            if rank in plan.chunks[w.chunk].targets
        ]
        self.last = self.last_of(self.in_order(movement.windows))
        self._bound: Bound[Binding] = Bound()
        self.sums = np.zeros(len(self.names), dtype=np.uint64)
        """The checksums of this rank's parts as they were sent last, by number of the name."""
        self.share = np.zeros(len(self.names), dtype=np.uint64)
        """This rank's share of those of the whole tensors."""

    def in_order(self, steps: Sequence[Sequence[Window]]) -> list[tuple[Key, Window]]:
        """The windows for this rank in the order of the steps."""
        most = max(map(len, steps), default=0)
        keys = [
            (source, windows[k].number) for k in range(most) for source, windows in enumerate(steps) if k < len(windows)
        ]
        return [(key, self.windows[key]) for key in keys if key in self.windows]

    def last_of(
        self, windows: Sequence[tuple[Key, Window]], present: Mapping[Key, NDArray[np.bool_]] | None = None
    ) -> dict[Key, list[str]]:
        """The names of which the last item that comes is in each window."""
        last: dict[str, Key] = {}
        for key, window in windows:
            if present is None or present[key].all():
                last.update(dict.fromkeys(window.names, key))
            else:
                here = zip(window.items, present[key].tolist(), strict=True)
                last.update({item.name: key for item, each in here if each})
        found: dict[Key, list[str]] = {}
        for name, key in last.items():
            found.setdefault(key, []).append(name)
        return found

    def receive(
        self,
        standby: Mapping[str, Tensor] | None,
        live: Mapping[str, Tensor],
        load: Callable[[dict[str, Tensor]], None],
        terms: Terms,
    ) -> Arrival:
        """Reads everything into ``standby``, calls ``load`` with whole tensors, and compares checksums.

        Without a standby each tensor lands in memory of its own, until it is loaded. ``live``: what serves, for those
        parts of a tensor that are unchanged.
        """
        movement = self._movement
        movement.scales({})
        if movement.publishing is not None:
            movement.publishing.attend(terms)
        reader = Reader(self, standby, live, load, terms)
        movement.fetch(self, reader, terms)
        return self._arrival(reader, terms)

    def receive_published(
        self, load: Callable[[dict[str, Tensor]], None], terms: Terms, every: bool
    ) -> tuple[Arrival, dict[str, Tensor], int]:
        """Maps the published copy; returns its tensors and number too. ``every``: checks all, not a share of them."""
        movement, publishing = self._movement, self._movement.publishing
        assert publishing is not None
        movement.scales({})
        tensors, nonce = publishing.fetch(terms)
        movement.pass_steps(terms)
        load(tensors)
        reader = Reader(self, tensors, {}, load, terms)
        reader.loaded = list(tensors)
        reader.moved = sum(tensor.nbytes for tensor in tensors.values())
        if terms.checksum:
            number, count = publishing.own_share()
            names = self.names if every else self.names[number::count]
            found = self.checker(names, tensors).sums()
            reader.found = {name: found.get(name, 0) for name in names}
        return self._arrival(reader, terms), tensors, nonce

    def present(self) -> dict[Key, NDArray[np.bool_]]:
        """Which items of each window were not left out."""
        tables = self._movement.tables
        return {key: tables[key[0]][window.first : window.stop, 0] != UNCHANGED for key, window in self.windows.items()}

    def places(self, key: Key) -> NDArray[np.int64]:
        """Where the items of a window lie."""
        window = self.windows[key]
        return self._movement.tables[key[0]][window.first : window.stop, 0]

    def heap(self, source: int) -> Tensor:
        """All shared tensors of a source, as bytes."""
        return self._movement.heaps[source]

    def bind(self, standby: Mapping[str, Tensor]) -> Binding:
        """The windows bound to memory."""

        def make() -> Binding:
            unpackers = {key: Unpacker(self.moves(key), standby) for key in self.windows}
            checkers = {key: self.checker(names, standby) for key, names in self.last.items()}
            return Binding(unpackers, checkers)

        return self._bound.of(standby, make)

    def moves(self, key: Key) -> list[Move]:
        """Where the items of a window lie in this rank's tensors."""
        if not self._moves:  # once for all updates of the line-up: a chunk has many windows
            plan, rank = self._movement.plan, self._movement.rank
            of = {chunk: plan.moves(rank, chunk) for chunk in {window.chunk for window in self.windows.values()}}
            for each, window in self.windows.items():
                self._moves[each] = [cut_move(of[window.chunk][item.piece], item) for item in window.items]
        return self._moves[key]

    def checker(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Checker:
        """The checksums of this rank's parts of some tensors."""
        own = self._movement.lineup.own
        return Checker(own_blocks(self.layout, own, {name: tensors[name] for name in names}))

    def own_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor."""
        boxes = self.layout[name].parts[self._movement.lineup.own]
        ends = [tuple(a + n for a, n in zip(box.at, box.shape, strict=True)) for box in boxes]
        return tuple(map(max, zip(*ends, strict=True)))

    def _arrival(self, reader: "Reader", terms: Terms) -> Arrival:
        loaded = reader.loaded
        given = dict.fromkeys(loaded)
        nbytes = sum(map(self._nbytes.__getitem__, loaded))
        skipped = [name for name in self.order if name not in given]
        if not terms.checksum:
            return Arrival(loaded, skipped, nbytes, reader.moved, [])
        sums, share = np.zeros_like(self.sums), np.zeros_like(self.share)
        for source, window, numbers, first in self._items:
            rows = self._tables[source][window.first : window.stop, 1].view(np.uint64)
            np.add.at(sums, numbers, rows)
            if first:
                np.add.at(share, numbers, rows)
        self.sums, self.share = sums, share
        sent = dict(zip(self.names, sums.tolist(), strict=True))
        wrong = [(name, sent[name], found) for name, found in reader.found.items() if found != sent[name]]
        return Arrival(loaded, skipped, nbytes, reader.moved, wrong)


class Reader:
    """One update at a target."""

    def __init__(
        self,
        target: Target,
        standby: Mapping[str, Tensor] | None,
        live: Mapping[str, Tensor],
        load: Callable[[dict[str, Tensor]], None],
        terms: Terms,
    ) -> None:
        self._target, self._live, self._load, self._terms = target, live, load, terms
        self._tensors: dict[str, Tensor] = dict(standby or {})
        self._bound = target.bind(standby) if standby is not None else None
        self._present: dict[Key, NDArray[np.bool_]] = {}
        self._last = target.last
        self.loaded: list[str] = []
        self.found: dict[str, int] = {}
        self.moved = 0

    def begin(self, steps: Sequence[Sequence[Window]]) -> None:
        """Reads what lies in the sources' heaps, once tables are there; ``steps``: what will come in the buckets."""
        target = self._target
        self._present = present = target.present()
        placed = [(key, window) for key, window in target.windows.items() if (target.places(key) >= 0).any()]
        last = target.last_of([*placed, *target.in_order(steps)], present)
        self._last = target.last if last == target.last else last
        for name in _partly(target.windows, present):
            self._memory(name).copy_(self._live[name])
        for key, window in placed:
            self._read_placed(key, window)
            if (target.places(key) >= 0).sum() == present[key].sum():
                self._complete(key)

    def _read_placed(self, key: Key, window: Window) -> None:
        places, moves, heap = self._target.places(key), self._target.moves(key), self._target.heap(key[0])
        names = window.names
        tensors = {name: self._memory(name) for name in names}
        for number, (item, at) in enumerate(zip(window.items, places.tolist(), strict=True)):
            if at >= 0:
                Unpacker([moves[number]._replace(start=0)], tensors).unpack(heap[at : at + item.nbytes])
                self.moved += item.nbytes

    def take(self, key: Key, chunk: Tensor) -> None:
        """Reads a window from the bucket."""
        target = self._target
        packed = target.places(key) == PACKED if self._present else None
        if packed is None or packed.all():
            unpacker = self._bound.unpackers[key] if self._bound else self._unpacker(key, None)
        else:
            unpacker = self._unpacker(key, packed)
        unpacker.unpack(chunk)
        self.moved += unpacker.nbytes
        self._complete(key)

    def _unpacker(self, key: Key, wanted: NDArray[np.bool_] | None) -> Unpacker:
        moves = self._target.moves(key)
        chosen = moves if wanted is None else [m for m, each in zip(moves, wanted, strict=True) if each]
        return Unpacker(rebased(chosen), {move.name: self._memory(move.name) for move in chosen})

    def _memory(self, name: str) -> Tensor:
        """Where a tensor lands."""
        if name not in self._tensors:
            dtype = self._target.layout[name].dtype
            self._tensors[name] = torch.empty(self._target.own_shape(name), dtype=dtype)
        return self._tensors[name]

    def _complete(self, key: Key) -> None:
        """Loads the tensors whose last item has come, and takes their checksums."""
        names = self._last.get(key)
        if not names:
            return
        bucket = {name: self._tensors[name] for name in names}
        self._load(bucket)
        self.loaded += names
        if self._terms.checksum:
            known = self._bound is not None and self._last is self._target.last
            checker = self._bound.checkers[key] if known and self._bound else self._target.checker(names, bucket)
            self.found |= checker.sums()
        if self._bound is None:
            for name in names:
                del self._tensors[name]


def _partly(windows: Mapping[Key, Window], present: Mapping[Key, NDArray[np.bool_]]) -> list[str]:
    """The tensors of which a part comes, and another is unchanged."""
    come: set[str] = set()
    stay: set[str] = set()
    for key, window in windows.items():
        for item, here in zip(window.items, present[key].tolist(), strict=True):
            (come if here else stay).add(item.name)
    return [name for name in come if name in stay]
