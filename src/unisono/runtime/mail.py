"""Messages that go in compiled loops (compiled_messages.py): what is prepared for them, and when.

Each end of a message may decide for itself whether it uses the loops: the wire is the same. When they are loaded:
loops.py.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.runtime.loops import MESSAGES, WARM, loops, wanted
from unisono.runtime.message import Letter
from unisono.runtime.message_words import HEARD, TABLE
from unisono.transport.futex import CROWDED
from unisono.transport.segment import Segment

__all__ = ["Job", "Mail"]

_JOB = struct.Struct("7q")  # as JOB of message_words.py

Job = tuple[int, int, int, int, int, int, int]
"""Whether it is sent, the peer, the addresses of head and payload, its bytes, those that have moved, whether the head
has (0, 1, OTHER)."""


class Mail:
    """The way of one rank in one group to the loops of messages."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment, self._rank, self._mode, self._left = segment, rank, wanted(), WARM
        self._table: Any = None
        self._at = 0
        self._ways: dict[str, Callable[..., int]] = {}
        self._jobs = bytearray(2 * segment.layout.world_size * _JOB.size)
        self._jobs_at = ctypes.addressof(ctypes.c_char.from_buffer(self._jobs))
        self._nap: Callable[..., int]
        self._carry: Callable[..., int]

    @property
    def there(self) -> bool:
        """Whether a message has found the loops ready."""
        return self._table is not None

    def ready(self) -> bool:
        """Whether the loops are there; to be asked once for each message."""
        if self._table is not None:
            return True
        if self._mode == 0:
            return False
        at_once = self._mode == 2 or loops.kept(MESSAGES)
        self._left -= 1
        if not at_once and self._left > 0:
            return False
        if not loops.serve(MESSAGES, at_once):
            return False
        self._set_up()
        return True

    def _set_up(self) -> None:
        layout, base, fused = self._segment.layout, self._segment.address, loops.of(MESSAGES)
        places = {
            "capacity": layout.ring,
            "rings": base + layout.rings,
            "controls": base + layout.ring_controls,
            "control": layout.RING_CONTROL,
            "bells": base + layout.bells,
            "rank": self._rank,
            "size": layout.world_size,
            "crowded": ctypes.addressof(CROWDED),
            "spins": 20 if self._segment.crowded else 500,
            "heard": 0,
        }
        self._table = np.array([places[name] for name in TABLE], np.int64)
        self._at = int(self._table.ctypes.data)
        self._heard = memoryview(self._table)[HEARD:]
        self._ways, self._nap, self._carry = fused, fused["nap"], fused["carry"]

    def carry(self, letter: Letter, peer: int, address: int, patience: int) -> int:
        """Moves a message from or to ``address`` as far as it goes, waiting ``patience`` ns for the peer at a time.

        Returns how many of its bytes are through; below 0, nothing is, and the message takes the long way.
        """
        return self._ways[letter.call.op](self._at, peer, letter.head, address, letter.nbytes, patience)

    def carry_all(self, jobs: Sequence[Job], patience: int) -> tuple[list[Job], int]:
        """Moves messages, one per end of a ring at most, until one of them is done or meets another than it expects, or
        all have waited ``patience`` ns for their peers.

        Returns what has become of the jobs, and this rank's bell before the last look: if it is still the same, then
        there is nothing to do.
        """
        for k, job in enumerate(jobs):
            _JOB.pack_into(self._jobs, k * _JOB.size, *job)
        self._carry(self._at, self._jobs_at, len(jobs), patience)
        found = [_JOB.unpack_from(self._jobs, k * _JOB.size) for k in range(len(jobs))]
        return found, self._heard[0] & 0xFFFFFFFF

    def nap(self, heard: int, nanoseconds: int) -> None:
        """Sleeps until this rank's bell, whose count was ``heard``, has rung, for ``nanoseconds`` at most."""
        self._nap(self._at, heard, nanoseconds)
