"""Facts about the traffic of a schedule on which placements rest: who reads what, what is complete, and when."""

from collections.abc import Sequence
from functools import lru_cache

from unisono.program.plan import Traffic, traffic
from unisono.schedule import Schedule

__all__ = ["arrival_slots", "completed", "has_mailboxes", "landed_before", "readers"]


def arrival_slots(step: Traffic) -> dict[int, dict[tuple[int, int], int]]:
    """Of each receiver, the number of every (source, chunk) that it gets in a step, by source, then chunk."""
    found: dict[int, dict[tuple[int, int], int]] = {}
    for source, to in sorted(step.messages.items()):
        for peer, chunks in to.items():
            numbers = found.setdefault(peer, {})
            for chunk in chunks:
                numbers[source, chunk] = len(numbers)
    return found


def readers(step: Traffic, rank: int) -> dict[int, list[int]]:
    """The ranks that get a chunk of ``rank`` in a step."""
    found: dict[int, list[int]] = {}
    for peer, chunks in sorted(step.messages.get(rank, {}).items(), key=lambda row: (row[0] < rank, row[0])):
        for id_ in chunks:
            found.setdefault(id_, []).append(peer)
    return found


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
    gave = {rank: readers(first, rank) for rank in first.messages}
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
