"""Whether calls of the background make progress beside computation: where there are cores free for it."""

import os

import torch

from unisono.errors import UsageError
from unisono.transport.layout import AFFINITY
from unisono.transport.process import affinity_mark
from unisono.transport.segment import Segment

__all__ = ["INLINE", "AsyncProgress"]

INLINE = 256 * 1024
"""Bytes up to which a call of the background is tried at once even where a core is free for the worker."""
_sharers: dict[int, int] = {}  # of a set of cores, the most ranks of a group that have been seen to share it


class AsyncProgress:
    """Decides for one group, once all of its ranks are there.

    ``UNISONO_ASYNC_PROGRESS`` 1 or 0 says so instead; raises `UsageError` for another value.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        wish = os.environ.get("UNISONO_ASYNC_PROGRESS", "")
        if wish not in ("", "0", "1"):
            raise UsageError(f"UNISONO_ASYNC_PROGRESS is {wish!r}, expected 0, 1, or nothing: by the free cores")
        self.on = wish == "1"
        self.decided = bool(wish)

    def decide(self) -> None:
        """Whether this rank has a core beyond those that its threads compute on, to be asked until it is decided.

        Ranks that may use the same cores have equal shares of them.
        """
        longs, segment = self._segment.longs, self._segment
        marks = [longs[segment.field(rank, AFFINITY)] for rank in range(segment.layout.world_size)]
        if not all(marks):
            return
        mine, available = affinity_mark(), len(os.sched_getaffinity(0))
        sharers = _sharers[mine] = max(_sharers.get(mine, 1), marks.count(mine))
        threads = min(torch.get_num_threads(), available)
        self.on, self.decided = available >= sharers * (threads + 1), True
