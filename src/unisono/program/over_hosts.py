"""The tables of a call whose ranks are on several hosts, and the order of their meetings. Never imports torch.

A meeting is (iteration, number in the body).
"""

from collections.abc import Sequence
from typing import Any

from unisono.program.bind import KIND, LEFT, MEET, Table, bind
from unisono.program.lower import lower
from unisono.program.slots import overlap_of
from unisono.schedule import Hosts, Schedule

__all__ = ["bind_over_hosts", "following", "passed"]


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


def passed(before: tuple[int, int], now: tuple[int, int], meets: int) -> list[tuple[int, int]]:
    """(iteration, meetings of the body passed in it) of the parts of a body that ran between two meetings."""
    found, (iteration, passed) = [], (before[0], before[1] + 1)
    while True:
        if passed > meets:
            iteration, passed = iteration + 1, 0
        found.append((iteration, passed))
        if (iteration, passed) == now:
            return found
        passed += 1


def following(table: Table, now: tuple[int, int]) -> tuple[int, int] | None:
    """Iteration and number, in the body, of the meeting after one; None if it is the last."""
    beyond = [row[LEFT] for row in table.rows.tolist() if row[KIND] == MEET]
    iteration, passed = now
    while iteration < table.pieces + table.lags:
        passed += 1
        if passed >= len(beyond):
            iteration, passed = iteration + 1, 0
        if iteration < table.pieces + beyond[passed]:
            return iteration, passed
    return None
