"""What a rank that receives does in a line-up: where its items land, and what is compared once they have."""

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unisono.weights.checksum import Checker, own_blocks
from unisono.weights.exposed import own_places
from unisono.weights.movement import Movement
from unisono.weights.packing import Move, Unpacker
from unisono.weights.published import File
from unisono.weights.reading import Reader
from unisono.weights.terms import UNCHANGED, Bound, Terms
from unisono.weights.terms import Key as MemoryKey
from unisono.weights.windows import Window, cut_move

__all__ = ["Arrival", "Target"]

Key = tuple[int, int]  # a source and the number of its window


class Arrival(NamedTuple):
    """What came: names that were loaded, how many were unchanged, their bytes, and what a checksum did not fit.

    ``nbytes``: of the tensors loaded; ``moved``: from process to process.
    """

    loaded: list[str]
    skipped: int
    nbytes: int
    moved: int
    wrong: list[tuple[str, int, int]]
    """Name, the checksum that was sent, that of what came."""


class Landing(NamedTuple):
    """Where the tensors land: memory by name, and what names it.

    summing: checksums are taken as they land, for nobody is asked to `load` them; ``load`` is then not called. put:
    sources write there.
    """

    tensors: dict[str, Tensor]
    key: MemoryKey
    summing: bool
    put: bool = False


class Binding(NamedTuple):
    """The windows bound to the memory in which they land."""

    unpackers: dict[Key, Unpacker]
    checkers: dict[Key, Checker]
    placed: dict[Key, tuple[bytes, Unpacker]]
    """Windows that lie in their source's heap, and where their items lay there."""
    partly: dict[Key, tuple[bytes, Unpacker]]
    """Windows of which some items came in a bucket last, and which."""
    landed: list[Checker]
    """Of what is whole with each meeting of `Movement.puts_between`."""


class Target:
    """What a rank that receives does in a line-up."""

    def __init__(self, movement: Movement) -> None:
        self.movement = movement
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
        mine = [(source, w) for source, w in windows if rank in plan.chunks[w.chunk].targets]
        self._sent = _by_source(mine, self.number, first)
        self.last = self.last_of(self.in_order(movement.windows))
        self.numbers = np.array([self.number[name] for name in self.order], dtype=np.int64)
        self._every = self._counted(lambda source, items: np.ones(len(items), dtype=np.bool_))
        self._total = sum(map(self._nbytes.__getitem__, self.order))
        self.exposed_places, self.exposed_nbytes = own_places(plan, lineup.replica, self.own)
        """Where tensors lie in what this rank exposes."""
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
        landing: Landing | None,
        live: Mapping[str, Tensor],
        load: Callable[[dict[str, Tensor]], None],
        terms: Terms,
    ) -> Arrival:
        """Reads everything into ``landing``, calls ``load`` with whole tensors, and compares checksums.

        Without a landing each tensor has memory of its own until it is loaded. ``live``: what serves, for those parts
        of a tensor that are unchanged.
        """
        movement = self.movement
        movement.scales({})
        if movement.publishing is not None:
            movement.publishing.attend(terms)
        reader = Reader(self, landing, live, load, terms)
        if landing is not None and landing.put:
            movement.fetch_put(reader, terms)
            reader.moved = sum(window.nbytes for window in self.windows.values())
        else:
            movement.fetch(self, reader, terms)
        reader.end()
        return self._arrival(reader, terms)

    def receive_published(
        self, load: Callable[[dict[str, Tensor]], None], terms: Terms, every: bool
    ) -> tuple[Arrival, File]:
        """Maps the published copy, and returns it too. ``every``: checks all, not a share of them."""
        movement, publishing = self.movement, self.movement.publishing
        assert publishing is not None
        movement.scales({})
        reader = Reader(self, None, {}, load, terms)
        numbers, checked = self._all_checked if every else self._share_checked
        if terms.checksum:
            reader.checked = checked
        file = publishing.fetch(terms, {} if every or not terms.checksum else numbers, reader.found)
        movement.pass_steps(terms)
        load(file.tensors(publishing.places))
        reader.loaded, reader.moved = self.names, self._published_nbytes
        if every and terms.checksum:  # as this replica has them: it may have written to its own mapping
            publishing.sum(file, numbers, reader.found)
        return self._arrival(reader, terms), file

    @cached_property
    def _all_checked(self) -> tuple[dict[str, int], NDArray[np.int64]]:
        """The numbers of all names."""
        return self.number, np.arange(len(self.names), dtype=np.int64)

    @cached_property
    def _share_checked(self) -> tuple[dict[str, int], NDArray[np.int64]]:
        """The numbers of those names whose checksums this rank takes of a published copy."""
        assert self.movement.publishing is not None
        number, count = self.movement.publishing.own_share()
        mine = np.arange(number, len(self.names), count, dtype=np.int64)
        return {self.names[at]: at for at in mine.tolist()}, mine

    @cached_property
    def _published_nbytes(self) -> int:
        """Bytes of the tensors in a published copy."""
        assert self.movement.publishing is not None
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in self.movement.publishing.places.values())

    def present(self) -> dict[Key, NDArray[np.bool_]]:
        """Which items of each window were not left out."""
        tables = self.movement.tables
        return {key: tables[key[0]][window.first : window.stop, 0] != UNCHANGED for key, window in self.windows.items()}

    def come(self) -> tuple[list[str], list[str]]:
        """The names of which something was not left out, in order, and those of them of which something was."""
        here = self._counted(lambda source, items: self._tables[source][items, 0] != UNCHANGED)
        if (here == self._every).all():
            return self.order, []
        some = np.flatnonzero(here)
        partly = some[here[some] < self._every[some]]
        return [self.order[at] for at in some.tolist()], [self.order[at] for at in partly.tolist()]

    def _counted(self, chosen: Callable[[int, NDArray[np.int64]], NDArray[np.bool_]]) -> NDArray[np.int64]:
        """How many of the ``chosen`` items of sources each tensor has, in order."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        for source, (items, numbers, _) in self._sent.items():
            counts += np.bincount(numbers[chosen(source, items)], minlength=len(counts))
        return counts[self.numbers]

    def places(self, key: Key) -> NDArray[np.int64]:
        """Where the items of a window lie."""
        window = self.windows[key]
        return self.movement.tables[key[0]][window.first : window.stop, 0]

    def heap(self, source: int) -> Tensor:
        """All shared tensors of a source, as bytes."""
        return self.movement.heaps[source]

    def bind(self, landing: Landing) -> Binding:
        """The windows bound to memory."""

        def make() -> Binding:
            if landing.put:
                return Binding({}, {}, {}, {}, [self._checker_into(names, landing.tensors) for names in self._whole()])
            unpackers = {key: self.unpacker(self.moves(key), landing.tensors) for key in self.windows}
            last = {} if landing.summing else self.last
            return Binding(unpackers, {key: self.checker(n, landing.tensors) for key, n in last.items()}, {}, {}, [])

        return self._bound.of((landing.put, landing.key), make)

    def unpacker(self, moves: Sequence[Move], tensors: Mapping[str, Tensor]) -> Unpacker:
        """Unpacks some items, and sums them by the numbers of their names."""
        return Unpacker(moves, tensors, [8 * self.number[move.name] for move in moves])

    def moves(self, key: Key) -> list[Move]:
        """Where the items of a window lie in this rank's tensors."""
        if not self._moves:  # once for all updates of the line-up: a chunk has many windows
            plan, rank = self.movement.plan, self.movement.rank
            of = {chunk: plan.moves(rank, chunk) for chunk in {window.chunk for window in self.windows.values()}}
            for each, window in self.windows.items():
                self._moves[each] = [cut_move(of[window.chunk][item.piece], item) for item in window.items]
        return self._moves[key]

    def checker(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Checker:
        """The checksums of this rank's parts of some tensors."""
        own = self.movement.lineup.own
        return Checker(own_blocks(self.layout, own, {name: tensors[name] for name in names}))

    def _checker_into(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Checker:
        """The same, of sums by the numbers of the names."""
        own = self.movement.lineup.own
        return Checker(own_blocks(self.layout, own, {name: tensors[name] for name in names}), self.number)

    def _whole(self) -> list[list[str]]:
        """The names of which the last item is put before each meeting of `Movement.puts_between`."""
        puts = self.movement.puts_between
        keys = [[(source, w.number) for source, windows in enumerate(each) for w in windows] for each in puts]
        last = {name: number for number, some in enumerate(keys) for key in some for name in self._names_of(key)}
        found: list[list[str]] = [[] for _ in puts]
        for name, number in last.items():
            found[number].append(name)
        return found

    def _names_of(self, key: Key) -> dict[str, None]:
        return self.windows[key].names if key in self.windows else {}

    def _arrival(self, reader: Reader, terms: Terms) -> Arrival:
        loaded, skipped = reader.loaded, len(self.order) - len(reader.loaded)
        nbytes = sum(map(self._nbytes.__getitem__, loaded)) if skipped else self._total
        if not terms.checksum:
            return Arrival(loaded, skipped, nbytes, reader.moved, [])
        sums, share = np.zeros_like(self.sums), np.zeros_like(self.share)
        for source, (items, numbers, first) in self._sent.items():
            values = self._tables[source][items, 1].view(np.uint64)
            np.add.at(sums, numbers, values)
            np.add.at(share, numbers, values * first)
        self.sums, self.share = sums, share
        checked = reader.checked
        differ = checked[reader.found[checked] != sums[checked]].tolist()
        wrong = [(self.names[number], int(sums[number]), int(reader.found[number])) for number in differ]
        return Arrival(loaded, skipped, nbytes, reader.moved, wrong)


Sent = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]


def _by_source(
    windows: Sequence[tuple[int, Window]], number: Mapping[str, int], first: Container[int]
) -> dict[int, Sent]:
    """By source: the items of windows, the numbers of their names, and whether their chunk is one of ``first``."""
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for source, window in windows:
        items = zip(range(window.first, window.stop), window.items, strict=True)
        found.setdefault(source, []).extend((at, number[item.name], window.chunk in first) for at, item in items)
    rows = {source: np.array(each, dtype=np.int64).reshape(-1, 3) for source, each in found.items()}
    return {source: (each[:, 0], each[:, 1], each[:, 2] == 1) for source, each in rows.items()}
