"""Chunks in elements: how long each is, and where it lies in the flat *work* tensor that a rank's plan is run on.

A block is what one rank owns (a pair of ranks for all_to_all, everything where nobody owns a chunk); blocks may differ
in size. Its `pieces` chunks have equal lengths but for the last ones, which may be shorter or empty. The work tensor
holds the chunks that the rank's plan mentions and no others, in order of their ids.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.run.plan import Plan, Span
from unisono.schedule import Collective

__all__ = ["Layout", "check_sizes", "equal_blocks", "layout"]


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
    """A plan with sizes: `lengths` per chunk id, `starts` in the work tensor (-1: not there), `numel` in all."""

    def __init__(self, plan: Plan, sizes: Sequence[int]) -> None:
        c = plan.collective
        check_sizes(c, sizes)
        copies = c.world_size + 1 if plan.deterministic else 1
        lengths = np.tile(_lengths(c, sizes), copies)
        held = np.asarray(plan.chunks, dtype=np.int64)
        ends = np.cumsum(lengths[held])
        starts = np.full(len(lengths), -1, dtype=np.int64)
        starts[held] = ends - lengths[held]
        self.plan, self.sizes = plan, tuple(sizes)
        self.lengths: list[int] = lengths.tolist()
        self.starts: list[int] = starts.tolist()
        self.numel = int(ends[-1]) if len(ends) else 0
        self.longest = max(self.lengths, default=0)
        self.compiled: dict[object, object] = {}

    def place(self, span: Span) -> slice:
        """Where a span lies in the work tensor."""
        last = span.chunk + span.count - 1
        return slice(self.starts[span.chunk], self.starts[last] + self.lengths[last])

    def length(self, span: Span) -> int:
        """Elements of a span, whether or not it is held here."""
        return sum(self.lengths[span.chunk : span.chunk + span.count])

    def block(self, number: int, first: int = 0) -> slice:
        """Where a block lies in the work tensor; `first` is the id of chunk 0 among contributions or sums."""
        pieces = self.plan.collective.pieces
        return self.place(Span(first + number * pieces, pieces))

    def chunk_at(self, element: int) -> int:
        """The chunk that an element of the work tensor belongs to, whoever contributed it."""
        held = self.plan.chunks
        at = bisect_right(held, element, key=lambda chunk: self.starts[chunk]) - 1
        return held[at] % self.plan.collective.num_chunks


@lru_cache(maxsize=512)
def layout(plan: Plan, sizes: tuple[int, ...]) -> Layout:
    """The layout of a plan for blocks of these sizes, in elements; cached. Raises UsageError for a wrong number."""
    return Layout(plan, sizes)
