"""The board where the ranks of a group meet: headers, staging areas, and the counters that say who has come.

A *meeting* is a point that no rank passes before all have arrived. Meetings are numbered from 0; what a rank writes
for meeting k lies in half ``k % 2`` of the board, its own part only. After meeting k everybody may read that half; a
rank that has arrived at meeting k + 1 has finished reading it, so that it may be written again for meeting k + 2. One
meeting per exchange is enough, and this parity is shared by every operation of the group.
"""

import time

import torch

from unisono.transport import futex
from unisono.transport.inference import outside_inference
from unisono.transport.segment import MEETINGS, Segment

__all__ = ["Board"]

_SPINS, _YIELDS, _PARTS = 20, 100, 256


class Board:
    """One rank's view of the meeting place of its group."""

    def __init__(self, segment: Segment, rank: int) -> None:
        layout = segment.layout
        self.segment, self.rank, self.size = segment, rank, layout.world_size
        self.meetings = 0  # completed
        self._counters = [
            futex.Counter(segment.words, (layout.counters + 64 * k) // 4, segment.address, full=self.size)
            for k in range(layout.COUNTERS)
        ]
        self._longs, self._words, self._begun = segment.longs, segment.words, segment.field(rank, MEETINGS)
        stages = segment.bytes[layout.stages : layout.total]
        self.stages = stages.view(2, self.size, layout.stage)
        self.stage_nbytes = layout.stage
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._parts: dict[tuple[int, torch.dtype], list[list[torch.Tensor]]] = {}

    @property
    def half(self) -> int:
        """Which half of the board belongs to the next meeting."""
        return self.meetings & 1

    def header_span(self, half: int, rank: int) -> tuple[int, int]:
        """First and last-plus-one byte of a rank's call header in the segment."""
        layout = self.segment.layout
        start = layout.headers + (half * self.size + rank) * layout.header
        return start, start + layout.header

    def arrive(self) -> None:
        """Says that this rank has come to the next meeting, with all it wrote before.

        Counts first: a rank that is killed in between must not pass for one that has come to an incomplete meeting.
        """
        self._counters[self.meetings & 3].add()
        self._longs[self._begun] = self.meetings + 1

    def complete(self) -> bool:
        """Whether all ranks have come to the meeting this rank has arrived at; if so, passes on to the next one."""
        counter = self._counters[self.meetings & 3]
        if self._words[counter.index] != self.size:
            return False
        futex.acquire()
        if self.rank == 0:
            # Everybody has arrived here, so nobody looks at the previous meeting's counter any more.
            self._words[self._counters[(self.meetings - 1) & 3].index] = 0
        self.meetings += 1
        return True

    def full(self) -> bool:
        """Whether all ranks have come, without passing on."""
        return bool(self._words[self._counters[self.meetings & 3].index] == self.size)

    def linger(self, seconds: float = futex.LINGER) -> bool:
        """Waits for the meeting while that is cheap: a few reads, then giving way to whoever wants this core.

        At most ``seconds``, and the yield that they end in.
        """
        words, index, size = self._words, self._counters[self.meetings & 3].index, self.size
        for _ in range(_SPINS):
            if words[index] == size:
                return self.complete()
        limit = time.perf_counter() + seconds
        for _ in range(_YIELDS):
            awake = futex.give_way()
            if words[index] == size:
                return self.complete()
            if not awake or time.perf_counter() > limit:
                break
        return False

    def sleep(self, seconds: float) -> None:
        """Sleeps in the kernel until the meeting is complete, at most ``seconds``."""
        counter = self._counters[self.meetings & 3]
        end = time.monotonic() + seconds
        seen = counter.value()
        while seen != self.size and (left := end - time.monotonic()) > 0:
            counter.sleep(seen, left)
            seen = counter.value()

    def missing(self) -> list[int]:
        """The ranks that have not come to the meeting this rank waits at."""
        number = self.meetings + 1
        return [r for r in range(self.size) if self._longs[self.segment.field(r, MEETINGS)] < number]

    @outside_inference
    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """All staging areas as ``dtype``: (2 halves, world size, elements)."""
        view = self._typed.get(dtype)
        if view is None:
            view = self._typed[dtype] = self.stages.view(dtype)
        return view

    def parts(self, numel: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The first ``numel`` elements of each rank's area, for either half; cached, small calls repeat."""
        found = self._parts.get((numel, dtype))
        if found is None:
            if len(self._parts) >= _PARTS:
                self._parts.clear()
            view = self.typed(dtype)[:, :, :numel]
            found = self._parts[numel, dtype] = [list(view[half]) for half in (0, 1)]
        return found
