"""The control block of one rank in one group: read by interpreters, which keep the state of a call in it."""

import ctypes
from array import array
from typing import Any

import numpy as np

from unisono.program.bind import Bases
from unisono.runtime import words as w
from unisono.runtime.monitor import CallLog
from unisono.transport.board import Board
from unisono.transport.futex import OVERSUBSCRIBED_UNTIL
from unisono.transport.layout import (
    ABORTED,
    COMPLETED,
    COMPLETED_AT,
    HEADER,
    ISSUE_TIMES,
    ISSUED,
    ISSUED_AT,
    MEETINGS,
    REFUSED,
)
from unisono.transport.shared_heap import BOUNDS

__all__ = ["Control"]

_SPINS, _OVERSUBSCRIBED_SPINS = 500, 2
"""Polls of a counter before the core is yielded: some ten microseconds where every rank has a core, since a yield may
hand it to another program for a slice of the scheduler's; next to none where ranks share cores."""


class Control:
    """The control block (words.py) at ``address``, which interpreters take."""

    def __init__(self, board: Board, call_log: CallLog, mapped: Any) -> None:
        size, segment = board.size, board.segment
        self._scratch = np.zeros(16 * w.BLOCK + 8 * (8 * size + 64), np.uint8)
        bases = Bases(size)
        self._bases = _table(bases, board)
        self._temps: list[Any] = []
        layout, base = segment.layout, segment.address
        record = base + 8 * segment.field(board.rank, 0)
        words = self._words = array("q", bytes(8 * w.CONTROL_WORDS))
        self.address = words.buffer_info()[0]
        words[w.RANK], words[w.SIZE], words[w.BASE] = board.rank, size, base
        words[w.COUNTERS], words[w.POSITION] = base + layout.counters, board.position.buffer_info()[0]
        words[w.HEADERS], words[w.HEADER] = base + layout.headers, layout.header
        words[w.HEADER_OFFSET], words[w.MEETINGS_BEGUN] = record + 8 * HEADER, record + 8 * MEETINGS
        words[w.ISSUED], words[w.COMPLETED] = record + 8 * ISSUED, record + 8 * COMPLETED
        words[w.COMPLETED_AT] = record + 8 * COMPLETED_AT
        words[w.ISSUED_AT], words[w.ISSUED_KEPT] = record + 8 * ISSUED_AT, ISSUE_TIMES
        words[w.ISSUE_TIMES], words[w.END_TIMES] = (
            call_log.issue_times.buffer_info()[0],
            call_log.end_times.buffer_info()[0],
        )
        words[w.KEPT] = len(call_log.issue_times)
        words[w.SCRATCH] = self._scratch.ctypes.data
        words[w.PLACES] = words[w.SCRATCH] + 16 * w.BLOCK
        words[w.HANDLES], words[w.BASES] = base + layout.handles, self._bases.buffer_info()[0]
        words[w.BOUNDS], words[w.MAPPED] = ctypes.addressof(BOUNDS), ctypes.addressof(mapped)
        words[w.ABORTED_AT], words[w.RECORD] = base + 8 * segment.field(0, ABORTED), layout.RECORD
        words[w.OUTPUT_BASE], words[w.TEMP_BASE], words[w.STAGE_BASES] = bases.output(), bases.temp, bases.stages
        words[w.PEER_INPUTS], words[w.PEER_OUTPUTS] = bases.peer_input(0), bases.peer_output(0)
        words[w.BASES_COUNT] = bases.length
        words[w.OVERSUBSCRIBED] = ctypes.addressof(OVERSUBSCRIBED_UNTIL)
        words[w.SPINS] = _OVERSUBSCRIBED_SPINS if segment.oversubscribed else _SPINS
        if board.crosses:  # no meeting is complete before what this rank staged is on its way
            words[w.SPINS] = 0
        words[w.FULL], words[w.RESETS] = board.arrivals, board.rank == board.local[0]
        words[w.REFUSED_AT] = record + 8 * REFUSED

    @property
    def position(self) -> tuple[int, int, int]:
        """Where the call under way waits: the number of its first meeting, the iteration, the place among the rows."""
        words = self._words
        return words[w.FIRST_MEETING], words[w.ITERATION], words[w.ROW]

    @property
    def arrived(self) -> bool:
        """True if the call under way waits at a meeting."""
        return bool(self._words[w.ARRIVED])

    @property
    def path(self) -> int:
        """The path of the last call; see zero_copy.py."""
        return self._words[w.PATH]

    def temp(self, nbytes: int) -> int:
        """The address of temporary memory of ``nbytes`` at least, which all calls share: one is under way at a time.

        Memory given before stays: a call that waits may hold partial sums in it.
        """
        if not self._temps or self._temps[-1].nbytes < nbytes:
            self._temps.append(np.empty(max(1 << 16, 2 * nbytes), np.uint8))
        return int(self._temps[-1].ctypes.data)


def _table(bases: Bases, board: Board) -> "array[int]":
    """The table of base addresses, with the staging areas in it, three halves running."""
    layout, table = board.segment.layout, array("q", bytes(8 * bases.length))
    for parity in (0, 1, 2):
        for rank in range(board.size):
            place = layout.stages + ((parity & 1) * board.size + rank) * layout.area
            table[bases.stage(rank, parity)] = board.segment.address + place
            table[bases.stage(rank, parity, True)] = board.segment.address + layout.inline_at(parity & 1, rank)
    return table
