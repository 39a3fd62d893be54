"""The readers of staging memory, over all ranks of a schedule. Never imports torch."""

from functools import lru_cache

from unisono.program.lower import lower
from unisono.schedule import Schedule

__all__ = ["slot_readers"]


@lru_cache(maxsize=256)
def slot_readers(schedule: Schedule, placement: str, deterministic: bool = False) -> dict[tuple[int, int], set[int]]:
    """The ranks that read each slot of staging memory, by (rank, slot); for placements that stage."""
    found: dict[tuple[int, int], set[int]] = {}
    for rank in range(schedule.world_size):
        for row in lower(schedule, rank, placement, deterministic).rows:
            for place in row.parts:
                if place.space == "stage":
                    found.setdefault((place.rank if place.rank >= 0 else rank, place.index), set()).add(rank)
    return found
