"""Chunks in elements: how long each is, and where it lies in the flat *work* tensor that a rank's plan is run on.

A block is what one rank owns (a pair of ranks for all_to_all, everything where nobody owns a chunk); blocks may differ
in size. Its `pieces` chunks have equal lengths but for the last ones, which may be shorter or empty. The work tensor
holds the chunks that the rank's plan mentions and no others, in order of their ids.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.run.plan import Plan, Span
from unisono.schedule import Collective

__all__ = ["Layout", "check_sizes", "equal_blocks", "layout"]

_KEPT = 64  # layouts of pieces


def equal_blocks(collective: Collective, source: Sequence[int], result: Sequence[int]) -> tuple[int, ...]:
    """Sizes of all blocks if they are equal, from those a rank has (or will have): elements per block.

    Raises UsageError if those are not equal.
    """
    known = list(source) or list(result)
    if len(set(known)) > 1:
        raise UsageError(f"{collective.name}: blocks of {known} elements are not equal; give the sizes of all blocks")
    return (known[0] if known else 0,) * (collective.num_chunks // collective.pieces)


def check_sizes(collective: Collective, sizes: Sequence[int]) -> None:
    """Raises UsageError unless there is one size, not negative, for every block."""
    blocks = collective.num_chunks // collective.pieces
    if len(sizes) != blocks or min(sizes) < 0:
        raise UsageError(
            f"{collective.name} over {collective.world_size} ranks has {blocks} blocks, got {len(sizes)} sizes: "
            f"{list(sizes)}"
        )


def _lengths(collective: Collective, sizes: Sequence[int]) -> NDArray[np.int64]:
    """Elements per chunk."""
    size, pieces = np.asarray(sizes, dtype=np.int64), collective.pieces
    each = -(-size // pieces)
    left = size[:, None] - np.arange(pieces)[None, :] * each[:, None]
    return np.clip(left, 0, each[:, None]).reshape(-1)


class Layout:
    """A plan with sizes: `lengths` per chunk id, `starts` in the work tensor (-1: not there), `numel` in all.

    `offsets` tells where in its block each chunk begins. `compiled` is for those who run the plan to keep things in.
    """

    def __init__(self, plan: Plan, sizes: tuple[int, ...], lengths: Sequence[int], starts: Sequence[int]) -> None:
        self.plan, self.sizes, self.lengths, self.starts = plan, sizes, lengths, starts
        self.numel = sum(lengths[chunk] for chunk in plan.chunks)
        self.longest = max(lengths, default=0)
        self.offsets = _offsets(lengths, plan.collective.pieces)
        self.compiled: dict[object, object] = {}
        self._pieces: dict[object, Layout] = {}

    @classmethod
    def of(cls, plan: Plan, sizes: tuple[int, ...]) -> "Layout":
        """The layout for blocks of these sizes, in elements. Raises UsageError unless there is one for each."""
        check_sizes(plan.collective, sizes)
        copies = plan.collective.world_size + 1 if plan.deterministic else 1
        lengths: list[int] = np.tile(_lengths(plan.collective, sizes), copies).tolist()
        return cls(plan, sizes, lengths, _packed(plan, lengths))

    def piece(self, number: int, width: int, in_place: bool) -> "Layout":
        """The layout of elements number * width .. (number + 1) * width - 1 of every chunk, for a smaller work tensor.

        `in_place`: for the whole work tensor, from element number * width on.
        """
        if self.longest <= width:
            return self
        lengths = [min(max(length - number * width, 0), width) for length in self.lengths]
        key = (tuple(lengths), in_place)
        found = self._pieces.get(key)
        if found is None:
            if len(self._pieces) >= _KEPT:
                self._pieces.clear()
            starts = self.starts if in_place else _packed(self.plan, lengths)
            found = self._pieces[key] = Layout(self.plan, self.sizes, lengths, starts)
            found.offsets = self.offsets
        return found

    def place(self, span: Span) -> slice:
        """Where a span lies in the work tensor (of a whole layout)."""
        last = span.chunk + span.count - 1
        return slice(self.starts[span.chunk], self.starts[last] + self.lengths[last])

    def length(self, span: Span) -> int:
        """Elements of a span, whether or not it is held here."""
        return sum(self.lengths[span.chunk : span.chunk + span.count])

    def runs(self, span: Span, beside: Callable[[int], int]) -> list[tuple[int, int, int]]:
        """The span in as few runs as can be: (index of the first chunk in it, element in the work tensor, elements).

        `beside(i)` is where chunk i of the span lies at the other end; runs are unbroken at both, without empty chunks.
        """
        found: list[tuple[int, int, int]] = []
        here = there = -1
        for i, length in enumerate(self.lengths[span.chunk : span.chunk + span.count]):
            if not length:
                continue
            start, other = self.starts[span.chunk + i], beside(i)
            if found and (start, other) == (here, there):
                first, at, numel = found[-1]
                found[-1] = (first, at, numel + length)
            else:
                found.append((i, start, length))
            here, there = start + length, other + length
        return found

    def chunk_at(self, element: int) -> int:
        """The chunk that an element of the work tensor belongs to, whoever contributed it."""
        held = self.plan.chunks
        at = bisect_right(held, element, key=lambda chunk: self.starts[chunk]) - 1
        return held[at] % self.plan.collective.num_chunks


def _offsets(lengths: Sequence[int], pieces: int) -> list[int]:
    """Where in its block each chunk begins."""
    found: list[int] = []
    for chunk in range(len(lengths)):
        found.append(0 if chunk % pieces == 0 else found[-1] + lengths[chunk - 1])
    return found


def _packed(plan: Plan, lengths: Sequence[int]) -> list[int]:
    """Starts of the chunks that the plan holds, one after the other."""
    starts, end = [-1] * len(lengths), 0
    for chunk in plan.chunks:
        starts[chunk], end = end, end + lengths[chunk]
    return starts


@lru_cache(maxsize=512)
def layout(plan: Plan, sizes: tuple[int, ...]) -> Layout:
    """The layout of a plan for blocks of these sizes, in elements; cached. Raises UsageError for a wrong number."""
    return Layout.of(plan, sizes)
