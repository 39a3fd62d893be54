"""The order of sums: how a schedule adds up the ranks' contributions to each chunk.

What meets at a rank in one step is added from the lowest rank to the highest, its own among them (program/plan.py).
So an order is an expression over ranks: `0+1+2+3` adds one after the other, `0+1+(2+3)` adds two partial sums. A
schedule with one order for all chunks, on all ranks, gives an element the same bits wherever it lies in a tensor.
"""

from dataclasses import dataclass

import numpy as np

from unisono.program.plan import traffic
from unisono.schedule import Schedule

__all__ = ["SumOrder", "sum_order"]


@dataclass(frozen=True)
class SumOrder:
    """The orders that occur, each once, in the order of the chunks; none where nothing is summed."""

    orders: tuple[str, ...]
    ascending: bool

    @property
    def uniform(self) -> bool:
        """True if every element's sum is taken alike."""
        return len(self.orders) <= 1

    def __str__(self) -> str:
        if not self.orders:
            return "nothing is summed"
        if self.uniform:
            return f"sums: {self.orders[0]} for every element" + ("" if self.ascending else ", not in rank order")
        shown = ", ".join(self.orders[:4]) + (", ..." if len(self.orders) > 4 else "")
        return f"sums: in {len(self.orders)} orders, by where an element lies: {shown}"


class _Sums:
    """Expressions by number: those below the number of ranks are ranks, each other one the sum of two before it."""

    def __init__(self, ranks: int) -> None:
        self.terms: list[tuple[int, int]] = [(rank, -1) for rank in range(ranks)]
        self.least = list(range(ranks))
        self.most = list(range(ranks))
        self.ascending = [True] * ranks
        self._known: dict[tuple[int, int], int] = {}

    def add(self, a: int, b: int) -> int:
        """The sum of two, which commutes: the one with the lower rank is named first."""
        if self.least[b] < self.least[a]:
            a, b = b, a
        if (a, b) not in self._known:
            self._known[a, b] = len(self.terms)
            self.terms.append((a, b))
            self.least.append(self.least[a])
            self.most.append(max(self.most[a], self.most[b]))
            self.ascending.append(self.ascending[a] and self.ascending[b] and self.most[a] < self.least[b])
        return self._known[a, b]

    def show(self, of: int) -> str:
        first, second = self.terms[of]
        if second < 0:
            return str(first)
        right = self.show(second)
        return f"{self.show(first)}+{right if self.terms[second][1] < 0 else f'({right})'}"


def sum_order(schedule: Schedule) -> SumOrder:
    """The order in which a schedule, found right by `verify`, adds up every chunk that a rank shall have.

    Raises ScheduleError if a transfer names ranks or chunks that do not exist or are not held, UsageError if the
    schedule needs a switch.
    """
    c = schedule.collective
    if not c.reduces or c.idempotent:
        return SumOrder((), True)
    sums = _Sums(c.world_size)
    held = [[rank] * c.num_chunks for rank in range(c.world_size)]
    for step in traffic(schedule, False):
        before = {src: {chunk: held[src][chunk] for chunk in chunks} for src, chunks in step.staged.items()}
        for dst, arrivals in step.arrivals.items():
            parts: dict[int, list[tuple[int, int]]] = {}
            for reduce, chunk, src in arrivals:
                if reduce:
                    parts.setdefault(chunk, [(dst, held[dst][chunk])]).append((src, before[src][chunk]))
                else:
                    held[dst][chunk] = before[src][chunk]
            for chunk, terms in parts.items():
                total, *rest = (term for _, term in sorted(terms))
                for term in rest:
                    total = sums.add(total, term)
                held[dst][chunk] = total
    ends = np.argwhere(c.held_after().T)  # by chunk, then rank
    found = dict.fromkeys(held[rank][chunk] for chunk, rank in ends)
    return SumOrder(tuple(map(sums.show, found)), all(sums.ascending[total] for total in found))
