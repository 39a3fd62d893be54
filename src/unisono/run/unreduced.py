"""Any schedule with its sums postponed: the way to one fixed order of summation.

Where the schedule reduces a partial sum into another, the contributions that the partial sum stands for are *moved* and
kept apart; where the last of them arrives, all are added up in rank order, and from there the sum travels as the
schedule says. So the result is ((x0 + x1) + x2) + ... whatever the algorithm, the chunking and the transport, the same
bits as the backend's own path.

The price is in the bytes: a partial sum of m contributions travels as m. Schedules that bring contributions straight to
where they are summed (one_shot, two_phase, star) pay nothing; in a ring the reduce-scatter's bytes grow by n/2, in
recursive doubling each step doubles them. Each rank keeps up to n + 1 copies of what it sums.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from unisono.errors import ScheduleError
from unisono.schedule import Schedule
from unisono.schedule.state import Units

__all__ = ["unreduced"]

Sums = list[tuple[int, int]]


def unreduced(schedule: Schedule, steps: Iterable[Units]) -> Iterator[tuple[Units, Sums]]:
    """Each of `steps` in units of single contributions, all copies, and the sums (rank, chunk) complete after it.

    With C chunks and n ranks, chunk id j * C + c is rank j's contribution to chunk c, and n * C + c is the sum. A
    first, empty step is put before, for one rank alone completes every sum at once. Raises ScheduleError if the
    schedule would count a contribution twice.
    """
    c = schedule.collective
    n, width = c.world_size, c.num_chunks
    everybody = (1 << n) - 1
    held = [[1 << rank] * width for rank in range(n)]
    yield _copies([]), [(0, chunk) for chunk in range(width)] if n == 1 else []
    for number, units in enumerate(steps):
        rows: list[tuple[int, int, int]] = []
        copied: list[tuple[int, int, int]] = []
        added: list[tuple[int, int, int]] = []
        for src, dst, chunk, reduce in zip(*(a.tolist() for a in _columns(units)), strict=True):
            has = held[src][chunk]
            who = [n] if has == everybody else [j for j in range(n) if has >> j & 1]
            rows += [(src, dst, j * width + chunk) for j in who]
            (added if reduce else copied).append((dst, chunk, has))
        for dst, chunk, has in copied:
            held[dst][chunk] = has
        complete = set()
        for dst, chunk, has in added:
            if held[dst][chunk] & has:
                raise ScheduleError(
                    f"step {number} of {schedule.name} adds contributions to chunk {chunk} at rank {dst} that it holds "
                    "already: verify() shows how"
                )
            held[dst][chunk] |= has
            if held[dst][chunk] == everybody:
                complete.add((dst, chunk))
        yield _copies(rows), sorted(complete)


def _columns(units: Units) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return units.src, units.dst, units.chunk, units.reduce


def _copies(rows: list[tuple[int, int, int]]) -> Units:
    src, dst, chunk = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Units(src, dst, chunk, np.zeros(len(rows), dtype=np.bool_), np.arange(len(rows)))
