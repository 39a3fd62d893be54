"""Outboxes: what the ranks of a host have staged for other hosts at a meeting, in words that all of them read.

A rank publishes its outbox once it has arrived. Whoever finds all outboxes of its host published is the last to come,
and sends for all of them. Two ranks that come at one time may both find that; both send, and one frame is dropped.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

from unisono.transport import futex
from unisono.transport.segment import Segment

__all__ = ["LATER", "NOTHING", "Outboxes", "Spans", "joined"]

Spans = list[tuple[int, int]]
"""Of bytes that a rank has staged: offsets in the segment, and how many there."""
NOTHING, LATER = 0xFFFFFFFF, 0xFFFFFFFE
"""In the place of a number of spans: nothing for that host; data that follows once all ranks agree on the call."""
_HEAD, _COUNT, _SPAN = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<QQ")


class Outboxes:
    """The outboxes of the ``local`` ranks, of which ``rank`` is one; each has spans for every one of ``hosts``."""

    def __init__(self, segment: Segment, rank: int, local: Sequence[int], hosts: int) -> None:
        layout = segment.layout
        self._segment, self._hosts = segment, hosts
        self._at = {each: layout.outboxes + each * layout.OUTBOX for each in local}
        self._mine = self._at[rank]
        self.most_spans = (layout.OUTBOX - 8 - _HEAD.size - _COUNT.size * hosts) // (_SPAN.size * hosts)
        """Spans for one host that have room."""

    def publish(self, meeting: int, waits: bool, found: Sequence[Spans | int]) -> None:
        """Publishes what goes to each host: spans, `NOTHING` or `LATER`.

        ``waits``: a rank of another host may have to see the frame before the meeting is complete.
        """
        data = _packed(waits, tuple(each if isinstance(each, int) else tuple(each) for each in found))
        self._segment.raw[self._mine + 8 : self._mine + 8 + len(data)] = data
        futex.release()
        self._segment.longs[self._mine // 8] = meeting + 1

    def complete(self, meeting: int) -> bool:
        """True if all ranks of this host have published for a meeting; of several that ask, the last one sees it."""
        futex.fence()
        longs = self._segment.longs
        return all(longs[at // 8] == meeting + 1 for at in self._at.values())

    def read(self) -> tuple[bool, dict[int, list[Spans | int]]]:
        """Whether any rank `waits`; by rank, what it has for each host. All must have published."""
        futex.acquire()
        raw, nbytes = self._segment.raw, self._segment.layout.OUTBOX
        read = {rank: _unpacked(raw[at + 8 : at + nbytes], self._hosts) for rank, at in self._at.items()}
        return any(waits for waits, _ in read.values()), {rank: found for rank, (_, found) in read.items()}


@lru_cache(maxsize=256)
def _packed(waits: bool, found: tuple[tuple[tuple[int, int], ...] | int, ...]) -> bytes:
    parts = [_HEAD.pack(waits)]
    for spans in found:
        if isinstance(spans, int):
            parts.append(_COUNT.pack(spans))
        else:
            parts += [_COUNT.pack(len(spans)), *(_SPAN.pack(*span) for span in spans)]
    return b"".join(parts)


@lru_cache(maxsize=256)
def _unpacked(data: bytes, hosts: int) -> tuple[bool, list[Spans | int]]:
    (waits,), place = _HEAD.unpack_from(data), _HEAD.size
    found: list[Spans | int] = []
    for _ in range(hosts):
        (count,) = _COUNT.unpack_from(data, place)
        place += _COUNT.size
        if count >= LATER:
            found.append(count)
        else:
            found.append([_SPAN.unpack_from(data, place + k * _SPAN.size) for k in range(count)])
            place += count * _SPAN.size
    return bool(waits), found


def joined(spans: Sequence[tuple[int, int]]) -> Spans:
    """Neighbours as one."""
    found: Spans = []
    for at, nbytes in sorted(set(spans)):
        if found and found[-1][0] + found[-1][1] == at:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        else:
            found.append((at, nbytes))
    return found
