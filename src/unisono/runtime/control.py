"""The control block of one rank in one group: what an interpreter reads and where it keeps the state of a call."""

import ctypes
from array import array
from typing import Any

import numpy as np

from unisono.program.bind import Bases
from unisono.runtime.words import BLOCK, CONTROL, MODE
from unisono.transport.arena import BOUNDS
from unisono.transport.board import Board
from unisono.transport.futex import CROWDED
from unisono.transport.layout import ABANDONED, COMPLETED, COMPLETED_AT, HEADER, ISSUED, ISSUED_AT, MEETINGS, MOMENTS
from unisono.watch.flight import CollectiveRecord

__all__ = ["Control"]

_SPINS, _CROWDED_SPINS = 500, 2
"""How often a counter is read before the core is yielded: for some ten microseconds where every rank has a core, for a
yield may hand it to another program for a slice of the scheduler's; hardly at all where ranks share cores."""


class Control:
    """See words.py; ``address`` is what interpreters are given."""

    def __init__(self, board: Board, flight: CollectiveRecord, mapped: Any) -> None:
        size, segment = board.size, board.segment
        self._scratch = np.zeros(16 * BLOCK + 8 * (8 * size + 64), np.uint8)
        self._bases = self._table_of_bases(board)
        self._temps: list[Any] = []
        layout, base = segment.layout, segment.address
        record = base + 8 * segment.field(board.rank, 0)
        places = {
            "rank": board.rank,
            "size": size,
            "counters": base + layout.counters,
            "headers": base + layout.headers,
            "header": layout.header,
            "begun": record + 8 * MEETINGS,
            "issued": record + 8 * ISSUED,
            "completed": record + 8 * COMPLETED,
            "completed_at": record + 8 * COMPLETED_AT,
            "header_place": record + 8 * HEADER,
            "issued_at": record + 8 * ISSUED_AT,
            "issued_kept": MOMENTS,
            "moments": flight.moments.buffer_info()[0],
            "ends": flight.ends.buffer_info()[0],
            "kept": len(flight.moments),
            "base": base,
            "scratch": self._scratch.ctypes.data,
            "places": self._scratch.ctypes.data + 16 * BLOCK,
            "crowded": ctypes.addressof(CROWDED),
            "offers": base + layout.offers,
            "bounds": ctypes.addressof(BOUNDS),
            "mapped": ctypes.addressof(mapped),
            "abandoned": base + 8 * segment.field(0, ABANDONED),
            "record": layout.RECORD,
            "bases": self._bases.buffer_info()[0],
            "position": board.position.buffer_info()[0],
            "spins": _CROWDED_SPINS if segment.crowded else _SPINS,
        }
        self._words = array("q", [places.get(name, 0) for name in CONTROL])
        self.address = self._words.buffer_info()[0]

    @staticmethod
    def _table_of_bases(board: Board) -> "array[int]":
        """With the staging areas in it, three halves running."""
        bases, layout = Bases(board.size), board.segment.layout
        table = array("q", bytes(8 * bases.length))
        for half in (0, 1, 2):
            for rank in range(board.size):
                place = layout.stages + ((half & 1) * board.size + rank) * layout.stage
                table[bases.stage(rank, half)] = board.segment.address + place
        return table

    @property
    def mode(self) -> int:
        """How the call that ran last went; see agreement.py."""
        return self._words[MODE]

    def temp(self, nbytes: int) -> int:
        """The address of temporary memory of ``nbytes`` at least, which all calls share: one is under way at a time.

        Memory given before stays, for a call that waits may hold partial sums in it.
        """
        if not self._temps or self._temps[-1].nbytes < nbytes:
            self._temps.append(np.empty(max(1 << 16, 2 * nbytes), np.uint8))
        return int(self._temps[-1].ctypes.data)
