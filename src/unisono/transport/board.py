"""The board where the ranks of a group meet: headers, staging areas, and the counters of arrivals.

A *meeting* is a point that no rank passes before all have arrived. Meetings are numbered from 0; a rank writes for
meeting k into its own part of the half of *parity* ``k % 2`` of the board. After meeting k every rank may read that
half; a rank that has arrived at meeting k + 1 has finished reading it, so it may be written again for meeting k + 2.
One meeting per exchange is enough, and all operations of the group share the parity.

Interpreters meet (runtime/interpreter.py); `Board` is the view of it for the queue.
"""

import time
from array import array

from unisono.transport import futex
from unisono.transport.layout import MEETINGS
from unisono.transport.segment import Segment

__all__ = ["Board"]


class Board:
    """One rank's view of the meeting place of its group.

    If ranks are on other hosts a meeting is complete once all have arrived, those by proxy, and every rank of this host
    has sent to the others what it staged (runtime/crossing.py).
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        layout = segment.layout
        self.segment, self.rank, self.size = segment, rank, layout.world_size
        elsewhere = segment.elsewhere
        self.crosses = elsewhere is not None
        self.local = elsewhere.local if elsewhere is not None else range(self.size)
        self.arrivals = self.size + self.crosses * len(self.local)
        self.position = array("q", [0])
        """The number of the next meeting that this rank passes; interpreters increment it."""
        self._counters = [
            futex.Counter(segment.words, layout.counter(k) // 4, segment.address) for k in range(layout.COUNTERS)
        ]
        self._arrivals_at = [segment.address + layout.counter(k) for k in range(layout.COUNTERS)]
        self._longs = segment.longs
        self._seen = 0

    def header_span(self, parity: int, rank: int) -> tuple[int, int]:
        """First and last-plus-one byte of a rank's call header in the segment."""
        layout = self.segment.layout
        start = layout.headers + (parity * self.size + rank) * layout.header
        return start, start + layout.header

    def headers(self) -> bytes:
        """The headers of all ranks at the meeting that was passed last."""
        return self.headers_of((self.position[0] - 1) & 1)

    def headers_of(self, parity: int) -> bytes:
        """The headers of all ranks in one half."""
        return self.segment.raw[self.header_span(parity, 0)[0] : self.header_span(parity, self.size - 1)[1]]

    def full(self) -> bool:
        """Returns True if all ranks have arrived at the next meeting."""
        return self._counters[self.position[0] & 3].value() == self.arrivals

    def arrive(self, meeting: int, wakes: bool = False, count: int = 1) -> None:
        """Counts arrivals at a meeting, for ranks of another host or for what this rank has sent there.

        ``wakes``: ranks that sleep are woken even if others are missing.
        """
        address = self._arrivals_at[meeting & 3]
        if wakes:
            futex.ring(address, count)
        else:
            futex.arrive(address, self.arrivals, count)

    def note(self) -> None:
        """Notes the arrivals so far: the next `sleep` returns if there are more."""
        self._seen = self._counters[self.position[0] & 3].value()

    def sleep(self, seconds: float) -> None:
        """Sleeps in the kernel until the next meeting is complete, at most ``seconds``.

        With ranks on other hosts it returns when woken, too, or if more ranks have arrived than were noted (`note`).
        """
        counter = self._counters[self.position[0] & 3]
        if self.crosses:
            if self._seen != self.arrivals:
                counter.sleep(self._seen, seconds)
            return
        end = time.monotonic() + seconds
        seen = counter.value()
        while seen != self.arrivals and (left := end - time.monotonic()) > 0:
            counter.sleep(seen, left)
            seen = counter.value()

    def missing(self) -> list[int]:
        """The ranks that have not arrived at the next meeting."""
        number = self.position[0] + 1
        return [r for r in range(self.size) if self._longs[self.segment.field(r, MEETINGS)] < number]
