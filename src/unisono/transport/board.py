"""The board where the ranks of a group meet: headers, staging areas, and the counters that say who has come.

A *meeting* is a point that no rank passes before all have arrived. Meetings are numbered from 0; what a rank writes
for meeting k lies in parity ``k % 2`` of the board, its own part only. After meeting k everybody may read that parity; a
rank that has arrived at meeting k + 1 has finished reading it, so that it may be written again for meeting k + 2. One
meeting per exchange is enough, and this parity is shared by every operation of the group.

Interpreters meet (runtime/interpreter.py); this is what is seen of it from outside.
"""

import time
from array import array

from unisono.transport import futex
from unisono.transport.layout import MEETINGS
from unisono.transport.segment import Segment

__all__ = ["Board"]


class Board:
    """One rank's view of the meeting place of its group."""

    def __init__(self, segment: Segment, rank: int) -> None:
        layout = segment.layout
        self.segment, self.rank, self.size = segment, rank, layout.world_size
        self.position = array("q", [0])
        """The number of the next meeting that this rank passes, which interpreters count on."""
        self._counters = [
            futex.Counter(segment.words, (layout.counters + 64 * k) // 4, segment.address)
            for k in range(layout.COUNTERS)
        ]
        self._longs = segment.longs
        self.stage_nbytes = layout.stage

    def header_span(self, parity: int, rank: int) -> tuple[int, int]:
        """First and last-plus-one byte of a rank's call header in the segment."""
        layout = self.segment.layout
        start = layout.headers + (parity * self.size + rank) * layout.header
        return start, start + layout.header

    def headers(self) -> bytes:
        """Those of all ranks at the meeting that was passed last."""
        parity = (self.position[0] - 1) & 1
        return self.segment.raw[self.header_span(parity, 0)[0] : self.header_span(parity, self.size - 1)[1]]

    def full(self) -> bool:
        """Whether all ranks have come to the next meeting."""
        return self._counters[self.position[0] & 3].value() == self.size

    def sleep(self, seconds: float) -> None:
        """Sleeps in the kernel until the next meeting is complete, at most ``seconds``."""
        counter = self._counters[self.position[0] & 3]
        end = time.monotonic() + seconds
        seen = counter.value()
        while seen != self.size and (left := end - time.monotonic()) > 0:
            counter.sleep(seen, left)
            seen = counter.value()

    def missing(self) -> list[int]:
        """The ranks that have not come to the next meeting."""
        number = self.position[0] + 1
        return [r for r in range(self.size) if self._longs[self.segment.field(r, MEETINGS)] < number]
