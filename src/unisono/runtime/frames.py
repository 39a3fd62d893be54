"""Frames of meetings: what the ranks of a host have for another one at a meeting, packed and, there, unpacked.

A frame of all ranks gives its meeting and the first one of the call, then, rank by rank, header, text, counts of calls,
and spans of staging memory with the data in them. A frame of one rank alone has data only.
"""

import struct
from collections.abc import Callable, Mapping, Sequence

from unisono.runtime.outbox import NOTHING, SPAN, Described
from unisono.transport.board import Board
from unisono.transport.host import HostMap
from unisono.transport.layout import CALL, COMPLETED, COMPLETED_AT, HEADER, ISSUED

__all__ = ["Frames"]

_HEAD = struct.Struct("<QQII")  # meeting, the call's first; whether ranks that sleep are woken; ranks in the frame
_RANK = struct.Struct("<IIIIQQ")  # rank; bytes of header and text; spans; calls issued, completed
_ALONE = struct.Struct("<QQII")  # meeting, the call's first; how much later it is due; spans
_EMPTY = Described.of([])


class Frames:
    """The frames that one rank of a group sends and receives; ``clock``: now, as the times of calls are written."""

    def __init__(self, board: Board, hosts: HostMap, clock: Callable[[], int]) -> None:
        self._board, self._segment, self._hosts, self._clock = board, board.segment, hosts, clock
        self._view, self._longs = memoryview(board.segment.raw), board.segment.longs

    def of_host(
        self, host: int, staged: Mapping[int, Sequence[Described | int]], meeting: int, first: int, wakes: bool,
        guarded: bool, words: bool,
    ) -> list[bytes | memoryview]:  # fmt: skip
        """The parts of a frame for a host; empty if no rank has something. ``staged``: by rank, for every host.

        ``wakes``: ranks that sleep are woken; ``guarded``: with headers; ``words``: with texts on a call that differs.
        """
        parts: list[bytes | memoryview] = [b""]
        segment, field = self._segment, self._segment.field
        count = 0
        for rank, found in staged.items():
            if (own := found[host]) == NOTHING:
                continue
            header, text, count = b"", b"", count + 1
            if guarded:
                start, stop = self._board.header_span(meeting & 1, rank)
                header = segment.raw[start:stop]
            if words:
                text = segment.text(rank, CALL).encode()
            own = own if isinstance(own, Described) else _EMPTY
            counts = self._longs[field(rank, ISSUED)], self._longs[field(rank, COMPLETED)]
            parts.append(_RANK.pack(rank, len(header), len(text), own.spans, *counts) + header + text + own.packed)
            parts += [self._view[each] for each in own.slices]
        parts[0] = _HEAD.pack(meeting, first, wakes, count)
        return parts if count else []

    def of_rank(self, spans: Described, meeting: int, first: int, late: int = 0) -> list[bytes | memoryview]:
        """The parts of a frame with what this rank alone has staged, due ``late`` meetings later."""
        head = _ALONE.pack(meeting, first, late, spans.spans)
        return [head, spans.packed, *(self._view[each] for each in spans.slices)]

    @staticmethod
    def head(body: memoryview) -> tuple[int, int, int, int]:
        """Of a host's frame: meeting, the call's first, whether ranks that sleep are woken, ranks in the frame."""
        return _HEAD.unpack_from(body)

    @staticmethod
    def head_of_rank(body: memoryview) -> tuple[int, int, int, int]:
        """Of a rank's frame: meeting, the call's first, how much later it is due, spans."""
        return _ALONE.unpack_from(body)

    def unpack(self, peer: int, body: memoryview, meeting: int, count: int) -> list[int]:
        """Writes a frame of the ranks of ``peer``'s host; returns these ranks."""
        segment, field, at, ranks = self._segment, self._segment.field, _HEAD.size, []
        host = self._hosts.of[peer]
        for _ in range(count):
            rank, header, text, spans, issued, completed = _RANK.unpack_from(body, at)
            if not (0 <= rank < self._board.size and self._hosts.of[rank] == host):
                raise RuntimeError(f"rank {peer} sent something for rank {rank}, which is not on its host")
            at += _RANK.size
            if header:
                start, stop = self._board.header_span(meeting & 1, rank)
                segment.raw[start:stop] = body[at : at + header]
                self._longs[field(rank, HEADER)] = start
            at += header
            if text:
                segment.set_text(rank, CALL, bytes(body[at : at + text]).decode())
            at = self._write(rank, body, at + text, spans)
            if completed != self._longs[field(rank, COMPLETED)]:
                self._longs[field(rank, COMPLETED_AT)] = self._clock()
            self._longs[field(rank, ISSUED)], self._longs[field(rank, COMPLETED)] = issued, completed
            ranks.append(rank)
        return ranks

    def unpack_of_rank(self, peer: int, body: memoryview, count: int) -> None:
        """Writes a frame of ``peer`` alone."""
        self._write(peer, body, _ALONE.size, count)

    def _write(self, rank: int, body: memoryview, at: int, count: int) -> int:
        """Writes spans, and the data behind them, to staging memory; returns where it ends."""
        layout, spans = self._segment.layout, [SPAN.unpack_from(body, at + k * SPAN.size) for k in range(count)]
        at += count * SPAN.size
        for offset, nbytes in spans:
            if not layout.stages <= offset <= offset + nbytes <= layout.device_numbers:
                raise RuntimeError(f"rank {rank} sent {nbytes} bytes for offset {offset}, outside of staging memory")
            self._view[offset : offset + nbytes] = body[at : at + nbytes]
            at += nbytes
        return at
