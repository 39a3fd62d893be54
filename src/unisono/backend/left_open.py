"""Memory of groups that this process made and left before all ranks had joined them.

Ranks whose first call is still to come must find it: messages sent to them may lie in it.
"""

import os

from unisono.backend.member_registry import MemberRegistry
from unisono.transport.layout import ABSENT, PID
from unisono.transport.segment import Segment

__all__ = ["close_joined", "disown", "keep"]

_left_open: list[tuple[int, Segment, set[int]]] = []  # with the ranks that were gone before they joined


def keep(fd: int, segment: Segment, members: MemberRegistry) -> None:
    """Keeps the descriptor open until no rank needs it; those that are gone already will never join."""
    absent = [rank for rank in range(segment.layout.world_size) if segment.state(rank) == ABSENT]
    _left_open.append((fd, segment, {rank for rank in absent if members.gone(rank).words}))


def close_joined(alone: bool) -> None:
    """Closes the memory that no rank needs; ``alone``: this process is in no group.

    That is when every rank has joined, or when none has: a later rank reads from the default group who has left.
    """
    for kept in list(_left_open):
        fd, segment, gone = kept
        ranks = range(segment.layout.world_size)
        unused = alone and not any(segment.longs[segment.field(rank, PID)] for rank in ranks)
        if unused or all(segment.state(rank) != ABSENT for rank in set(ranks) - gone):
            _left_open.remove(kept)
            os.close(fd)


def disown() -> None:
    """In a forked child: closes its copies of the descriptors."""
    for fd, *_ in _left_open:
        os.close(fd)
    _left_open.clear()
