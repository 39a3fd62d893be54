"""One chunk's life as a text grid: a row per step, a column per rank, in each cell the contributions held.

chunk 0           rank 0  rank 1  rank 2
before            0       1       2
step 0  1>0 +     0-1     1       2
step 1  2>0 +     0-2     1       2
                  ^ here
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.model import Schedule, Transfer
from unisono.schedule.state import states

__all__ = ["contributions", "life_of_chunk"]


def contributions(counts: NDArray[np.int16]) -> str:
    """Contributors as ranges, e.g. `0-3+5`; one that is there m times is written `m×5`; nothing is `·`."""
    ranks = np.flatnonzero(counts)
    parts: list[str] = []
    first = 0
    for i in range(1, len(ranks) + 1):
        if i < len(ranks) and ranks[i] == ranks[i - 1] + 1 and counts[ranks[i]] == counts[ranks[i - 1]]:
            continue
        a, b, times = int(ranks[first]), int(ranks[i - 1]), int(counts[ranks[first]])
        span = str(a) if a == b else f"{a}-{b}"
        parts.append(span if times == 1 else f"{times}×{span}" if a == b else f"{times}×({span})")
        first = i
    return "+".join(parts) or "·"


def life_of_chunk(
    schedule: Schedule, chunk: int, steps: Iterable[int], mark: tuple[int, int] | None = None, note: str = ""
) -> str:
    """The grid of `chunk` over the given explicit steps, with an arrow and a note under the cell mark = (step, rank).

    A mark at step num_steps points at the end.
    """
    shown = set(steps)
    nodes = schedule.world_size + schedule.switches
    names = [f"rank {r}" if r < schedule.world_size else f"switch {r}" for r in range(nodes)]
    rows = [[f"chunk {chunk}", *names]]
    marked = len(rows)
    for i, (state, label) in enumerate(zip(states(schedule, [chunk]), _labels(schedule, chunk), strict=True)):
        step = i - 1
        if step < 0 or step in shown:
            rows.append([label, *(contributions(state.at(r, chunk)) for r in range(nodes))])
        last = i == schedule.num_steps
        if last and mark is not None and mark[0] == schedule.num_steps and shown != {step}:
            rows.append(["after", *(contributions(state.at(r, chunk)) for r in range(nodes))])
        if mark is not None and step <= mark[0]:
            marked = len(rows) - 1
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = ["".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if mark is not None:
        lines.insert(marked + 1, " " * sum(widths[: mark[1] + 1]) + f"^ {note}".rstrip())
    return "\n".join(lines)


def _labels(schedule: Schedule, chunk: int) -> Iterable[str]:
    yield "before"
    for i, step in enumerate(schedule.explicit_steps()):
        moved = [t for t in step if t.chunk <= chunk < t.chunk + t.count]
        yield f"step {i}  {_short(moved)}".rstrip()


def _short(moved: list[Transfer]) -> str:
    """`0>1 +, 2>3 +`; more than four transfers are counted."""
    texts = [f"{t.src}>{t.dst} {'+' if t.reduce else '='}" for t in moved]
    return ", ".join(texts) if len(texts) <= 4 else f"{', '.join(texts[:3])}, {len(texts) - 3} more"
