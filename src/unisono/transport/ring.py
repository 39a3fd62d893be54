"""One-way rings of bytes between two ranks: how point-to-point messages travel.

One writer, one reader. Both ends count the bytes they have passed since the beginning; the difference is what lies in
the ring. The writer stores data, then its count (after a release, see futex.py), then rings the reader's bell; the
reader copies out, stores its count and rings the writer's bell. A message is a 64-byte head and its payload, both
rounded up to 64 bytes, so that a head never wraps around the end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.transport import futex
from unisono.transport.segment import Segment

__all__ = ["UNIT", "Refusal", "Ring"]

UNIT = 64
_WORD = 2**64


class Refusal(NamedTuple):
    """A message that its reader refused: its number in the ring, from 1, its tag, and elements and dtype codes."""

    number: int
    tag: int
    sent: int
    sent_dtype: int
    wanted: int
    wanted_dtype: int


class Ring:
    """The ring from ``source`` to ``destination``, as seen by either end."""

    def __init__(self, segment: Segment, source: int, destination: int) -> None:
        layout = segment.layout
        pair = source * layout.world_size + destination
        control = layout.ring_controls + pair * layout.RING_CONTROL
        start = layout.rings + pair * layout.ring
        self.capacity, self.start = layout.ring, start
        self._longs, self._raw = segment.longs, segment.raw
        self._written_at, self._read_at = control // 8, (control + 64) // 8
        # Next to the counts of bytes, for the search for deadlocks: messages posted by the writer; messages the reader
        # has opened, and how many receives it has out that could take one.
        self._posted_at, self._opened_at, self._wanted_at = (
            control // 8 + 1,
            (control + 64) // 8 + 1,
            (control + 64) // 8 + 2,
        )
        self._refused_at = (control + 128) // 8  # how many messages, then the last of them
        self.heads = 0  # messages begun, as the writer counts them

    def post(self, change: int = 1) -> None:
        """Counts a message that the writer will send (+1), or will not after all (-1)."""
        self._longs[self._posted_at] += change

    def opened(self, change: int = 1) -> int:
        """Counts a message that the reader has begun to read; returns its number."""
        number = self._longs[self._opened_at] = self._longs[self._opened_at] + change
        return number

    def refuse(self, refusal: Refusal) -> None:
        """Records a message that the reader refuses, for the writer."""
        longs, at = self._longs, self._refused_at
        count = longs[at]
        longs[at] = 0  # until it is complete
        futex.release()
        for k, value in enumerate(refusal, 1):
            longs[at + k] = value % _WORD
        futex.release()
        longs[at] = count + 1
        futex.release()

    def refusal(self) -> tuple[int, Refusal]:
        """How many messages the reader has refused, and the last of them."""
        longs, at = self._longs, self._refused_at
        while True:
            count = longs[at]
            futex.acquire()
            number, tag, *rest = longs[at + 1 : at + 1 + len(Refusal._fields)]
            futex.acquire()
            if longs[at] == count:
                return count, Refusal(number, tag - _WORD * (tag >= _WORD // 2), *rest)

    def want(self, change: int) -> None:
        """Counts a receive that was posted (+1) or has ended (-1)."""
        self._longs[self._wanted_at] += change

    def idle(self) -> bool:
        """Returns True if the reader has opened every message that was posted."""
        return bool(self._longs[self._posted_at] == self._longs[self._opened_at])

    def unopened(self) -> int:
        """The number of messages posted that the reader has not opened."""
        return int(self._longs[self._posted_at] - self._longs[self._opened_at])

    def unwanted(self) -> bool:
        """Returns True if the reader has no receive posted."""
        return bool(self._longs[self._wanted_at] == 0)

    def starved(self) -> bool:
        """Returns True if the reader has a receive posted and has opened every message that was posted."""
        return bool(self._longs[self._wanted_at]) and self.idle()

    # Of a ring whose other end is on another host: the counts of both ends travel (runtime/mirrored_rings.py)

    def written(self) -> int:
        """Bytes written since the beginning."""
        count = int(self._longs[self._written_at])
        futex.acquire()
        return count

    def posted(self) -> int:
        """Messages that the writer has posted."""
        return int(self._longs[self._posted_at])

    def reader_counts(self) -> tuple[int, ...]:
        """What the reader writes: bytes read, messages opened, receives wanted; refusals: how many, and the last."""
        longs, at = self._longs, self._refused_at
        return (
            longs[self._read_at], longs[self._opened_at], longs[self._wanted_at],
            *longs[at : at + 1 + len(Refusal._fields)],
        )  # fmt: skip

    def set_reader_counts(self, counts: Sequence[int], refused: Callable[[], None]) -> None:
        """Writes the `reader_counts` of the other end; ``refused`` is called if there are refusals among them."""
        longs, at = self._longs, self._refused_at
        if counts[3] != longs[at]:
            longs[at] = 0
            futex.release()
            for k, value in enumerate(counts[4:], 1):
                longs[at + k] = value
            futex.release()
            longs[at] = counts[3]
            refused()
        longs[self._opened_at], longs[self._wanted_at] = counts[1], counts[2]
        futex.release()
        longs[self._read_at] = counts[0]

    def set_writer_counts(self, written: int, posted: int) -> None:
        """Writes what the writer of the other end has written and posted."""
        self._longs[self._posted_at] = posted
        futex.release()
        self._longs[self._written_at] = written

    def there(self) -> int:
        """Bytes the reader may take now."""
        nbytes = self._longs[self._written_at] - self._longs[self._read_at]
        futex.acquire()
        return nbytes

    def head(self, ahead: int = 0) -> bytes:
        """The 64 bytes that lie ``ahead`` of the read place."""
        at = self.start + (self._longs[self._read_at] + ahead) % self.capacity
        return self._raw[at : at + UNIT]

    def open(self) -> bytes:
        """Takes the head that comes next; the writer is to be woken."""
        head = self.head()
        futex.release()
        self._longs[self._read_at] += UNIT
        return head
