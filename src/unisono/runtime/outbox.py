"""Outboxes: what the ranks of a host have staged for other hosts at a meeting, in words that all of them read.

A rank publishes its outbox once it has arrived. Whoever finds all outboxes of its host published is the last to come,
and sends for all of them. Two ranks that come at one time may both find that; both send, and one frame is dropped.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from unisono.transport import futex
from unisono.transport.segment import Segment

__all__ = ["LATER", "NOTHING", "SPAN", "Described", "Outboxes", "Spans", "joined", "packed"]

Spans = list[tuple[int, int]]
"""Of bytes that a rank has staged: offsets in the segment, and how many there."""
NOTHING, LATER = 0xFFFFFFFF, 0xFFFFFFFE
"""In the place of a number of spans: nothing for that host; data that follows once all ranks agree on the call."""
SPAN = struct.Struct("<QQ")  # offset in the segment, bytes
_STATE = struct.Struct("<II")  # whether a frame is waited for; bytes that follow
_COUNT = struct.Struct("<I")
_AHEAD = 8 + _STATE.size  # bytes of an outbox before its spans: the meeting, and these


class Described(NamedTuple):
    """Spans as a frame has them: how many, their description in bytes, where they begin and end in the segment."""

    spans: int
    packed: bytes
    slices: tuple[slice, ...]

    @staticmethod
    def of(spans: Spans) -> "Described":
        """The same spans, so described."""
        slices = tuple(slice(at, at + nbytes) for at, nbytes in spans)
        return Described(len(spans), b"".join(SPAN.pack(*span) for span in spans), slices)


class Outboxes:
    """The outboxes of the ``local`` ranks, of which ``rank`` is one; each has spans for every one of ``hosts``."""

    def __init__(self, segment: Segment, rank: int, local: Sequence[int], hosts: int) -> None:
        layout = segment.layout
        self._segment, self._hosts = segment, hosts
        self._at = {each: layout.outboxes + each * layout.OUTBOX for each in local}
        self._mine = self._at[rank]
        self._meetings = [at // 8 for at in self._at.values()]
        self.most_spans = (layout.OUTBOX - _AHEAD - _COUNT.size * hosts) // (SPAN.size * hosts)
        """Spans for one host that have room."""

    def publish(self, meeting: int, data: bytes) -> None:
        """Publishes what goes to each host, as `packed` gives it."""
        self._segment.raw[self._mine + 8 : self._mine + 8 + len(data)] = data
        futex.release()
        self._segment.longs[self._mine // 8] = meeting + 1

    def complete(self, meeting: int) -> bool:
        """True if all ranks of this host have published for a meeting; of several that ask, the last one sees it."""
        futex.fence()
        longs = self._segment.longs
        return all(longs[at] == meeting + 1 for at in self._meetings)

    def read(self) -> tuple[bool, dict[int, list[Described | int]]]:
        """Whether any rank waits for a frame; by rank, what it has for each host. All must have published."""
        futex.acquire()
        raw, anyone, every = self._segment.raw, False, {}
        for rank, at in self._at.items():
            waits, nbytes = _STATE.unpack_from(raw, at + 8)
            anyone |= bool(waits)
            every[rank] = _unpacked(raw[at + _AHEAD : at + _AHEAD + nbytes], self._hosts)
        return anyone, every


def packed(waits: bool, found: Sequence[Spans | int]) -> bytes:
    """What a rank has for each host: spans, `NOTHING` or `LATER`.

    ``waits``: a rank of another host may have to see the frame before the meeting is complete.
    """
    parts = []
    for spans in found:
        if isinstance(spans, int):
            parts.append(_COUNT.pack(spans))
        else:
            parts += [_COUNT.pack(len(spans)), *(SPAN.pack(*span) for span in spans)]
    data = b"".join(parts)
    return _STATE.pack(waits, len(data)) + data


@lru_cache(maxsize=256)
def _unpacked(data: bytes, hosts: int) -> list[Described | int]:
    place = 0
    found: list[Described | int] = []
    for _ in range(hosts):
        (count,) = _COUNT.unpack_from(data, place)
        place += _COUNT.size
        if count >= LATER:
            found.append(count)
        else:
            found.append(Described.of([SPAN.unpack_from(data, place + k * SPAN.size) for k in range(count)]))
            place += count * SPAN.size
    return found


def joined(spans: Sequence[tuple[int, int]]) -> Spans:
    """Neighbours as one."""
    found: Spans = []
    for at, nbytes in sorted(set(spans)):
        if found and found[-1][0] + found[-1][1] == at:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        else:
            found.append((at, nbytes))
    return found
