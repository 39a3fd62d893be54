"""One update at a target: its items are read where they lie, whole tensors loaded, checksums of what came taken."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.weights.checksum import Checker
from unisono.weights.exposed import own_shape
from unisono.weights.packing import Unpacker
from unisono.weights.rows import address_of
from unisono.weights.source import rebased
from unisono.weights.terms import PACKED, Terms
from unisono.weights.windows import Window

if TYPE_CHECKING:
    from unisono.weights.target import Key, Landing, Target

__all__ = ["Reader"]


class Reader:
    """One update at a target."""

    def __init__(
        self,
        target: "Target",
        landing: "Landing | None",
        live: Mapping[str, Tensor],
        load: Callable[[dict[str, Tensor]], None],
        terms: Terms,
    ) -> None:
        self._target, self._live, self._load, self._terms = target, live, load, terms
        self._tensors = landing.tensors if landing is not None else {}
        self._bound = target.bind(landing) if landing is not None else None
        self._summing = landing is not None and landing.summing
        self._tables = False
        self._come, self._partly = target.order, list[str]()
        self._last = target.last
        self.loaded: list[str] = []
        self.found = np.zeros(len(target.names), dtype=np.uint64)
        """Checksums of what came, by the number of the name."""
        self.checked = np.zeros(0, dtype=np.int64)
        """The numbers of which `found` has the checksum."""
        self._sums = address_of(self.found) if self._summing and terms.checksum else 0
        self.moved = 0

    def begin(self, steps: Sequence[Sequence[Window]]) -> None:
        """Reads what lies in the sources' heaps, once tables are there; ``steps``: what will come in the buckets."""
        target = self._target
        self._tables, present = True, target.present()
        placed = [(key, window) for key, window in target.windows.items() if (target.places(key) >= 0).any()]
        if not self._summing:
            last = target.last_of([*placed, *target.in_order(steps)], present)
            self._last = target.last if last == target.last else last
        self._come, self._partly = target.come()
        for name in self._partly:
            self._memory(name).copy_(self._live[name])
        for key, window in placed:
            self._read_placed(key, window)
            if (target.places(key) >= 0).sum() == present[key].sum():
                self.complete(key)

    def _read_placed(self, key: "Key", window: Window) -> None:
        """Reads the items of a window that lie in their source's heap."""
        target = self._target
        places = target.places(key)
        known = self._bound.placed.get(key) if self._bound is not None else None
        if known is None or known[0] != places.tobytes():
            here = [(move, at) for move, at in zip(target.moves(key), places.tolist(), strict=True) if at >= 0]
            tensors = {move.name: self._memory(move.name) for move, _ in here}
            known = places.tobytes(), target.unpacker([move._replace(start=at) for move, at in here], tensors)
            if self._bound is not None:
                self._bound.placed[key] = known
        known[1].unpack(target.heap(key[0]), self._sums, target.movement.past)
        self.moved += (
            window.nbytes
            if (places >= 0).all()
            else sum(item.nbytes for item, at in zip(window.items, places.tolist(), strict=True) if at >= 0)
        )

    def take(self, key: "Key", chunk: Tensor) -> None:
        """Reads a window from the bucket."""
        target = self._target
        packed = target.places(key) == PACKED if self._tables else None
        if packed is None or packed.all():
            unpacker = self._bound.unpackers[key] if self._bound else self._unpacker(key, None)
        else:
            unpacker = self._partly_unpacker(key, packed)
        unpacker.unpack(chunk, self._sums, target.movement.past)
        self.moved += unpacker.nbytes
        self.complete(key)

    def end(self) -> None:
        """Everything has come."""
        target = self._target
        if not self._summing:
            return
        self.loaded = self._come
        if self._terms.checksum:
            all_came = self.loaded is target.order
            self.checked = target.numbers if all_came else np.array([target.number[n] for n in self.loaded], np.int64)
            if self._partly:
                self._check(target.checker(self._partly, self._tensors))

    def _unpacker(self, key: "Key", wanted: NDArray[np.bool_] | None) -> Unpacker:
        moves = self._target.moves(key)
        chosen = moves if wanted is None else list(compress(moves, wanted.tolist()))
        return self._target.unpacker(rebased(chosen), {move.name: self._memory(move.name) for move in chosen})

    def _partly_unpacker(self, key: "Key", packed: NDArray[np.bool_]) -> Unpacker:
        which, known = packed.tobytes(), self._bound.partly.get(key) if self._bound is not None else None
        if known is None or known[0] != which:
            known = which, self._unpacker(key, packed)
            if self._bound is not None:
                self._bound.partly[key] = known
        return known[1]

    def _memory(self, name: str) -> Tensor:
        """Where a tensor lands."""
        if name not in self._tensors:
            dtype = self._target.layout[name].dtype
            self._tensors[name] = torch.empty(own_shape(self._target.layout[name].parts[self._target.own]), dtype=dtype)
        return self._tensors[name]

    def landed(self, number: int) -> None:
        """Takes the checksums of what sources have put before a meeting."""
        if self._sums and self._bound is not None:
            self._bound.landed[number].add(self._sums)

    def complete(self, key: "Key") -> None:
        """Loads the tensors whose last item has come, and takes their checksums."""
        names = self._last.get(key)
        if not names or self._summing:
            return
        bucket = {name: self._tensors[name] for name in names}
        self._load(bucket)
        self.loaded += names
        if self._terms.checksum:
            known = self._bound is not None and self._last is self._target.last
            self._check(self._bound.checkers[key] if known and self._bound else self._target.checker(names, bucket))
            self.checked = np.append(self.checked, [self._target.number[name] for name in names])
        if self._bound is None:
            for name in names:
                del self._tensors[name]

    def _check(self, checker: Checker) -> None:
        for name, value in checker.sums().items():
            self.found[self._target.number[name]] = value
