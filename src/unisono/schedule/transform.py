"""Building schedules from schedules: write out, refine, replicate over groups of ranks.

A hierarchical algorithm is a small schedule played by many groups at once; these functions place it there.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.model import LazySteps, Step

__all__ = ["flatten", "overlap", "place", "refine"]


def flatten(steps: Sequence[Step]) -> Sequence[Step]:
    """The explicit steps of a sequence that may hold compact ones, made when looked at."""
    ends = list(accumulate(step.repeat for step in steps))
    if not ends or ends[-1] == len(steps):
        return steps

    def make(i: int) -> Step:
        at = bisect_right(ends, i)
        return steps[at].at(i - (ends[at] - steps[at].repeat))

    return LazySteps(ends[-1], make)


def refine(steps: Sequence[Step], factor: int) -> Sequence[Step]:
    """The same steps when every chunk is cut into `factor` chunks that travel together."""
    if factor == 1:
        return steps
    plain = flatten(steps)

    def make(i: int) -> Step:
        s = plain[i]
        return Step.make(s.src, s.dst, s.chunk * factor, s.count * factor, s.reduce)

    return LazySteps(len(plain), make)


def place(steps: Sequence[Step], ranks: NDArray[np.int64], chunks: NDArray[np.int64]) -> Sequence[Step]:
    """The same steps played by several groups at once.

    ranks: int64, shape (groups, local ranks), the rank that plays each local rank. chunks: int64, shape (groups, local
    chunks), the chunk that stands for each local chunk; the rows may differ by an offset only. Transfers of chunks
    that are not neighbours any more are split.
    """
    plain = flatten(steps)
    runs_on = np.diff(chunks[0], append=chunks[0, -1]) == 1
    breaks = np.flatnonzero(~runs_on)
    run_end = breaks[np.searchsorted(breaks, np.arange(chunks.shape[1]))]

    def make(i: int) -> Step:
        return Step.together(*_placed(plain[i], ranks, chunks, run_end))

    return LazySteps(len(plain), make)


def overlap(steps: Sequence[Step], world_size: int, chunks: NDArray[np.int64]) -> Sequence[Step]:
    """The same steps for several pieces, each one step behind the piece before it.

    chunks: int64, shape (pieces, local chunks), the chunk of each piece that stands for each local chunk. Step t holds
    step t of piece 0, step t-1 of piece 1 and so on: while one piece is under way between hosts, the next one is summed
    inside.
    """
    own = np.arange(world_size)[None, :]
    placed = [place(steps, own, piece[None, :]) for piece in chunks]
    length = len(placed[0])

    def make(t: int) -> Step:
        pieces = range(max(0, t - length + 1), min(len(placed), t + 1))
        return Step.together(*(placed[p][t - p] for p in pieces))

    return LazySteps(length + len(placed) - 1 if length else 0, make)


def _placed(step: Step, ranks: NDArray[np.int64], chunks: NDArray[np.int64], run_end: NDArray[np.int64]) -> list[Step]:
    parts: list[Step] = []
    first, left = step.chunk.astype(np.int64), step.count.astype(np.int64)
    todo = np.arange(len(step))
    while len(todo) or not parts:
        here = first[todo]
        count = np.minimum(left[todo], run_end[here] - here + 1)
        src, dst, chunk = ranks[:, step.src[todo]], ranks[:, step.dst[todo]], chunks[:, here]
        shape = src.shape
        counts, reduces = np.broadcast_to(count, shape), np.broadcast_to(step.reduce[todo], shape)
        parts.append(Step.make(src.ravel(), dst.ravel(), chunk.ravel(), counts.ravel(), reduces.ravel()))
        first[todo] += count
        left[todo] -= count
        todo = todo[left[todo] > 0]
    return parts
