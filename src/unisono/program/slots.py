"""The readers of staging memory, over all ranks of a schedule, and what of them allows pieces to overlap.

Never imports torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from unisono.program.lower import lower
from unisono.program.program import Program
from unisono.schedule import Schedule

__all__ = ["LATE", "ROOM", "WINDOWS", "Overlap", "StageWrite", "overlap_of", "readers_of", "slot_readers"]

LATE = 3
"""Meetings from one that sends to other hosts to the one after which these read what came: that many pieces are under
way at a time. An odd number: what is read after the last meeting of a call lies in the half of staging memory that the
first meeting of the next call does not use."""
WINDOWS = 4
"""Parts of staging memory that an overlapping program uses in turn, one a meeting: two in each half. What was staged is
read before `LATE` more meetings, so that it is overwritten after it was read."""
ROOM = 1 << 20
"""Bytes that a rank sends to other hosts at a call's first meeting, before it knows that all make the same call."""


@dataclass(frozen=True)
class Overlap:
    """How the pieces of a program overlap: a piece runs every part of the program in another iteration.

    ``lags``: iterations by which the rows before each meeting, and those after the last, are behind the first ones.
    ``places``: by (rank, slot), the number of a slot in a window; ``slots``: how many a window has.
    """

    lags: tuple[int, ...]
    places: dict[tuple[int, int], int]
    slots: int


@dataclass(frozen=True, slots=True)
class StageWrite:
    """One row's write to staging memory: slot ``index`` of ``rank``, after ``meets`` meetings of the body.

    In iteration i it is piece i - ``lag``, at offset ``at`` of the half that `Bases.stage` names ``other``; its length
    is ``min(most, left - piece * shrink)`` bytes, none if that is negative.
    """

    meets: int
    lag: int
    rank: int
    index: int
    other: int
    at: int
    left: int
    shrink: int
    most: int


@lru_cache(maxsize=256)
def slot_readers(schedule: Schedule, placement: str, deterministic: bool = False) -> dict[tuple[int, int], set[int]]:
    """The ranks that read each slot of staging memory, by (rank, slot); for placements that stage."""
    return readers_of(lower(schedule, rank, placement, deterministic) for rank in range(schedule.world_size))


def readers_of(programs: Iterable[Program]) -> dict[tuple[int, int], set[int]]:
    """The same, of the programs of all ranks."""
    found: dict[tuple[int, int], set[int]] = {}
    for program in programs:
        for row in program.rows:
            for place in row.parts:
                if place.space == "stage":
                    owner = place.rank if place.rank >= 0 else program.rank
                    found.setdefault((owner, place.index), set()).add(program.rank)
    return found


@lru_cache(maxsize=256)
def overlap_of(
    schedule: Schedule, placement: str, deterministic: bool, hosts: tuple[tuple[int, ...], ...]
) -> Overlap | None:
    """How pieces overlap where ranks are on several ``hosts``; None if they can not.

    They can if nothing is kept from one part of the program to the next but what is staged, which is read in the very
    next part.
    """
    programs = [lower(schedule, rank, placement, deterministic) for rank in range(schedule.world_size)]
    if placement != "staged" or any(program.temps for program in programs):
        return None
    host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    slots, used = programs[0].slots, {}
    steps = [step for step, count in enumerate(slots) for _ in range(count)]
    delays = [1] * len(slots)
    for program in programs:
        part = 0
        for row in program.rows:
            part += row.kind == "meet"
            for place in row.parts:
                if place.space == "stage":
                    owner, step = place.rank if place.rank >= 0 else program.rank, steps[place.index]
                    if step != part - 1:
                        return None
                    used[owner, place.index] = 0
                    if host[owner] != host[program.rank]:
                        delays[step] = LATE
    places: dict[tuple[int, int], int] = {}
    for rank, slot in sorted(used):
        places[rank, slot] = sum(owner == rank for owner, _ in places)
    lags = [sum(delays[:step]) for step in range(len(delays) + 1)]
    return Overlap(tuple(lags), places, max(places.values(), default=0) + 1)
