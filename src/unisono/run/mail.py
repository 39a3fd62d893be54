"""Messages that go in compiled loops (fused_messages.py): what is prepared for them, and when.

Each end of a message may decide for itself whether it uses the loops: the wire is the same. When they are loaded:
loops.py.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.run.loops import MESSAGES, WARM, loops, wanted
from unisono.run.message import head
from unisono.transport.futex import CROWDED
from unisono.transport.segment import Segment
from unisono.watch.call import Call

__all__ = ["SILENT", "Letter", "Mail", "letter"]

SILENT = -1
"""Bytes carried of a message of which nothing has come, or can go, as in fused_messages.py."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A kind of message, prepared: its call, tag and size, and the address of the head that goes before it."""

    call: Call
    tag: int
    nbytes: int
    head: int
    kept: Any  # the memory behind the address


def letter(call: Call, tag: int, nbytes: int) -> Letter:
    """The letter of a message of ``nbytes``."""
    data = np.frombuffer(head(call, tag, nbytes), np.uint8)
    return Letter(call, tag, nbytes, int(data.ctypes.data), data)


class Mail:
    """The way of one rank in one group to the loops of messages."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment, self._rank, self._mode, self._left = segment, rank, wanted(), WARM
        self._table: Any = None
        self._at = 0
        self._ways: dict[str, Callable[..., int]] = {}
        self._nap: Callable[..., None]

    def ready(self) -> bool:
        """Whether the loops are there; to be asked once for each message."""
        if self._table is not None:
            return True
        at_once = self._mode == 2
        if not at_once:
            self._left -= 1
            if self._mode == 0 or self._left > 0:
                return False
        if not loops.serve(MESSAGES, at_once):
            return False
        self._set_up()
        return True

    def _set_up(self) -> None:
        layout, base, fused = self._segment.layout, self._segment.address, loops.messages
        places = {
            "capacity": layout.ring,
            "rings": base + layout.rings,
            "controls": base + layout.ring_controls,
            "control": layout.RING_CONTROL,
            "bells": base + layout.bells,
            "rank": self._rank,
            "size": layout.world_size,
            "crowded": ctypes.addressof(CROWDED),
        }
        self._table = np.array([places[name] for name in fused.TABLE], np.int64)
        self._at = int(self._table.ctypes.data)
        self._ways, self._nap = {"send": fused.send, "recv": fused.recv}, fused.nap

    def carry(self, letter: Letter, peer: int, address: int, patience: int) -> int:
        """Moves a message from or to ``address`` as far as it goes, waiting ``patience`` ns for the peer at a time.

        Returns how many of its bytes are through; below 0, nothing is, and the message takes the long way.
        """
        return self._ways[letter.call.op](self._at, peer, letter.head, address, letter.nbytes, patience)

    def nap(self, heard: int, nanoseconds: int) -> None:
        """Sleeps until this rank's bell, whose count was ``heard``, has rung, for ``nanoseconds`` at most."""
        self._nap(self._at, heard, nanoseconds)
