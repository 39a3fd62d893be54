"""The control block of the messages of one rank in one group, and the loops that run them: compiled once these are
there (loops.py), in Python until then. Each end of a message may go either way: the wire is the same.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence

from unisono.runtime import message_words as w
from unisono.runtime.loops import COMPILE_AFTER, MESSAGES, loops, wanted
from unisono.runtime.message import PreparedMessage
from unisono.runtime.pending_messages import Job
from unisono.runtime.torch_ops import MESSAGE_LOOPS
from unisono.transport.futex import OVERSUBSCRIBED_UNTIL
from unisono.transport.segment import Segment

__all__ = ["MessageControl"]

_JOB = struct.Struct(f"{w.JOB_WORDS}q")


class MessageControl:
    """See message_words.py."""

    def __init__(self, segment: Segment, rank: int) -> None:
        layout, base = segment.layout, segment.address
        self._jobs = array("q", bytes((2 * layout.world_size + 1) * _JOB.size))
        self._jobs_at = self._jobs.buffer_info()[0]
        words = self._words = array("q", bytes(8 * w.CONTROL_WORDS))
        words[w.CAPACITY], words[w.RINGS] = layout.ring, base + layout.rings
        words[w.CONTROLS], words[w.RING_CONTROL] = base + layout.ring_controls, layout.RING_CONTROL
        words[w.BELLS], words[w.RANK], words[w.SIZE] = base + layout.bells, rank, layout.world_size
        words[w.OVERSUBSCRIBED], words[w.SPINS] = (
            ctypes.addressof(OVERSUBSCRIBED_UNTIL),
            20 if segment.oversubscribed else 500,
        )
        words[w.JOB] = self._jobs_at + 2 * layout.world_size * _JOB.size
        self._at = words.buffer_info()[0]
        self._mode, self._left = wanted(), COMPILE_AFTER
        self._loops: dict[str, Callable[..., int]] = MESSAGE_LOOPS

    def _change_over(self) -> None:
        """Changes over to compiled loops if they are there; to be asked once for each message."""
        at_once = self._mode == 2 or loops.kept(MESSAGES)
        self._left -= 1
        if (at_once or self._left <= 0) and loops.serve(MESSAGES, at_once):
            self._loops, self._mode = loops.of(MESSAGES), 0

    def progress(self, message: PreparedMessage, peer: int, address: int, patience: int) -> int:
        """Moves a message from or to ``address`` as far as it goes, waiting ``patience`` ns for the peer at a time.

        Returns how many of its bytes are through; below 0, nothing is, and the message has to be queued.
        """
        if self._mode:
            self._change_over()
        return self._loops[message.op](self._at, peer, message.head, address, message.nbytes, patience)

    def progress_all(self, jobs: Sequence[Job], patience: int) -> tuple[list[Job], int]:
        """Moves messages, one per end of a ring at most, until one of them is done or meets another than it expects, or
        all have waited ``patience`` ns for their peers.

        Returns what has become of the jobs, and this rank's bell before the last look: if it is still the same, then
        there is nothing to do.
        """
        if self._mode:
            self._change_over()
        for k, job in enumerate(jobs):
            _JOB.pack_into(self._jobs, k * _JOB.size, *job)
        self._loops["progress"](self._at, self._jobs_at, len(jobs), patience)
        found = [_JOB.unpack_from(self._jobs, k * _JOB.size) for k in range(len(jobs))]
        return found, self.bell_seen

    @property
    def bell_seen(self) -> int:
        """The count of this rank's bell before the last poll of the loop that ran last."""
        return self._words[w.BELL_SEEN] & 0xFFFFFFFF

    def sleep_on_bell(self, seen: int, nanoseconds: int) -> None:
        """Sleeps until this rank's bell, whose count was ``seen``, has rung, for ``nanoseconds`` at most."""
        self._loops["sleep_on_bell"](self._at, seen, nanoseconds)
