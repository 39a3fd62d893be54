"""The tables of a call whose ranks are on several hosts. Never imports torch."""

from collections.abc import Sequence
from typing import Any

from unisono.program.bind import Table, bind
from unisono.program.lower import lower
from unisono.program.slots import overlap_of
from unisono.schedule import Hosts, Schedule

__all__ = ["bind_over_hosts"]


def bind_over_hosts(
    schedule: Schedule, rank: int, placement: str, nbytes: Sequence[int], hosts: Hosts, *, stage: int, cap: int,
    deterministic: bool = False, itemsize: int = 1, wide: int = 0, **how: Any,
) -> Table:  # fmt: skip
    """The table of a rank, its pieces overlapping where they can; ``stage``: bytes that a rank stages at a meeting.

    The staging memory has room for twice as much. Other arguments are those of `lower` and `bind`.
    """
    program = lower(schedule, rank, placement, deterministic)
    cap = min(cap, stage // max((*program.slots, 1)) * itemsize // (wide or itemsize))
    overlap = overlap_of(schedule, placement, deterministic, hosts)
    return bind(
        program, nbytes, area=2 * stage, cap=cap, itemsize=itemsize, wide=wide, crosses=True, overlap=overlap, **how
    )
