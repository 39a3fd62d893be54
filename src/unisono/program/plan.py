"""The plan of a schedule, step by step: who sends which chunks to whom, and what lands where.

All transfers of a step from one rank to another are one message: the chunks that any of them names, each once, in
order. A rank posts every message of a step before it waits for any, so that no order of messages can deadlock. Messages
and stagings are read before anything of the step is written (`Schedule`'s rule: a transfer carries what its source held
when the step began); then the *landings* take effect, copies first. The reductions that meet in one chunk are combined
with what is there **in rank order**, so that ranks that sum the same parts in one step get the same bits.

For shared memory a rank *stages* every chunk that it sends in a step once, however many ranks read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.program.unreduced import Unit, unreduced
from unisono.schedule import Schedule
from unisono.schedule.state import Units, well_formed

__all__ = ["Landing", "Traffic", "completed", "has_mailboxes", "landed_before", "traffic"]


class Landing(NamedTuple):
    """A chunk that arrives at a rank from these peers: reduced into what is there, or copied over it (one peer)."""

    reduce: bool
    chunk: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A step of all ranks: chunks by sender and receiver, what lands (reduce, chunk, sender) by receiver; sorted.

    Chunk ids are the schedule's. If contributions travel apart, with C chunks and n ranks, id j * C + c is rank j's
    contribution to chunk c and n * C + c is its sum; ``sums``: the chunks (0 .. C-1), by rank, all of whose
    contributions are there after the step.
    """

    messages: dict[int, dict[int, list[int]]]
    arrivals: dict[int, list[tuple[bool, int, int]]]
    staged: dict[int, list[int]]
    sums: dict[int, list[int]]

    @property
    def busiest(self) -> int:
        """The most chunks that a rank stages."""
        return max(map(len, self.staged.values()), default=0)

    def landings(self, rank: int) -> list[Landing]:
        """What arrives at a rank: copies, then reductions, chunk by chunk."""
        found: list[Landing] = []
        for (reduce, chunk), rows in groupby(self.arrivals.get(rank, []), key=lambda row: row[:2]):
            peers = tuple(peer for _, _, peer in rows)
            found += [Landing(True, chunk, peers)] if reduce else [Landing(False, chunk, (peer,)) for peer in peers]
        return found

    def readers(self, rank: int) -> dict[int, list[int]]:
        """The ranks that get a chunk of ``rank``, by chunk."""
        found: dict[int, list[int]] = {}
        for peer, chunks in sorted(self.messages.get(rank, {}).items(), key=lambda row: (row[0] < rank, row[0])):
            for id_ in chunks:
                found.setdefault(id_, []).append(peer)
        return found

    def arrival_slots(self) -> dict[int, dict[tuple[int, int], int]]:
        """Of each receiver, the number of every (source, chunk) that it gets, by source, then chunk."""
        found: dict[int, dict[tuple[int, int], int]] = {}
        for source, to in sorted(self.messages.items()):
            for peer, chunks in to.items():
                numbers = found.setdefault(peer, {})
                for chunk in chunks:
                    numbers[source, chunk] = len(numbers)
        return found


@lru_cache(maxsize=32)
def traffic(schedule: Schedule, deterministic: bool) -> tuple[Traffic, ...]:
    """The steps of a schedule; cached, since ranks may be threads of one process.

    ``deterministic``: contributions travel unreduced (see unreduced.py), for collectives that sum. Raises ScheduleError
    if a transfer names ranks or chunks that do not exist or are not held.
    """
    rows = _checked(schedule)
    steps = unreduced(schedule, rows) if deterministic else ((step, []) for step in rows)
    return tuple(_sorted_out(units, sums) for units, sums in steps)


def _checked(schedule: Schedule) -> Iterator[list[Unit]]:
    before = schedule.collective.held_before()
    held = np.vstack(
        [before, np.ones((schedule.switches, before.shape[1]), dtype=np.bool_)]
    )  # a switch sums what comes
    for number, step in enumerate(schedule.explicit_steps()):
        if not well_formed(schedule, step).all():
            raise ScheduleError(
                f"step {number} of {schedule.name} names ranks or chunks that do not exist: verify() shows which"
            )
        units = Units.of(schedule, step)
        _check_held(f"step {number} of {schedule.name} sends", held, units.src, units.chunk)
        copies = units.only(~units.reduce)
        held[copies.dst, copies.chunk] = True
        sums = units.only(units.reduce)
        _check_held(f"step {number} of {schedule.name} reduces into", held, sums.dst, sums.chunk)
        yield list(
            zip(units.src.tolist(), units.dst.tolist(), units.chunk.tolist(), units.reduce.tolist(), strict=True)
        )


def _check_held(what: str, held: NDArray[np.bool_], ranks: NDArray[np.int64], chunks: NDArray[np.int64]) -> None:
    lacking = np.flatnonzero(~held[ranks, chunks])
    if lacking.size:
        rank, chunk = ranks[lacking[0]], chunks[lacking[0]]
        raise ScheduleError(f"{what} chunk {chunk} at rank {rank}, which holds nothing of it: verify() shows where")


def _sorted_out(units: list[Unit], sums: Sequence[tuple[int, int]]) -> Traffic:
    messages: dict[int, dict[int, set[int]]] = {}
    arrivals: dict[int, list[tuple[bool, int, int]]] = {}
    for src, dst, chunk, reduce in units:
        messages.setdefault(src, {}).setdefault(dst, set()).add(chunk)
        arrivals.setdefault(dst, []).append((reduce, chunk, src))
    complete: dict[int, list[int]] = {}
    for rank, chunk in sums:
        complete.setdefault(rank, []).append(chunk)
    return Traffic(
        {src: {dst: sorted(chunks) for dst, chunks in to.items()} for src, to in messages.items()},
        {dst: sorted(rows) for dst, rows in arrivals.items()},
        {src: sorted(set().union(*to.values())) for src, to in messages.items()},
        {rank: sorted(chunks) for rank, chunks in complete.items()},
    )


def has_mailboxes(moves: Sequence[Traffic]) -> bool:
    """True if every chunk spread in the second of two steps was summed in the first, out of parts that only its
    spreader read, and goes to ranks that gave such a part.
    """
    if len(moves) != 2:
        return False
    first, second = moves
    if any(reduce for rows in second.arrivals.values() for reduce, _, _ in rows):
        return False
    if not all(reduce for rows in first.arrivals.values() for reduce, _, _ in rows):
        return False
    summed = {rank: {chunk for _, chunk, _ in rows} for rank, rows in first.arrivals.items()}
    gave = {rank: first.readers(rank) for rank in first.messages}
    for source, to in second.messages.items():
        for peer, chunks in to.items():
            for chunk in chunks:
                if chunk not in summed.get(source, ()) or gave.get(peer, {}).get(chunk) != [source]:
                    return False
    return True


def landed_before(moves: Sequence[Traffic]) -> list[dict[int, set[int]]]:
    """Of each step and rank, the chunks on which something has landed by its beginning."""
    found: list[dict[int, set[int]]] = [{}]
    for step in moves:
        now = {rank: set(chunks) for rank, chunks in found[-1].items()}
        for rank, rows in step.arrivals.items():
            now.setdefault(rank, set()).update(chunk for _, chunk, _ in rows)
        found.append(now)
    return found


@lru_cache(maxsize=64)
def completed(schedule: Schedule) -> frozenset[tuple[int, int, int]]:
    """(step, rank, chunk) of everything that lands and is complete: all contributions to the chunk are in it."""
    n, found = schedule.world_size, set()
    held = [[1 << r if has else 0 for has in row] for r, row in enumerate(schedule.collective.held_before())]
    full = (1 << n) - 1
    for number, step in enumerate(traffic(schedule, False)):
        before = {src: {chunk: held[src][chunk] for chunk in chunks} for src, chunks in step.staged.items()}
        for dst, rows in step.arrivals.items():
            for reduce, chunk, src in rows:
                held[dst][chunk] = (held[dst][chunk] if reduce else 0) | before[src][chunk]
                if held[dst][chunk] == full:
                    found.add((number, dst, chunk))
    return frozenset(found)
