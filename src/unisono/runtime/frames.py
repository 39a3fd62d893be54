"""Frames of meetings: what the ranks of a host have for another one at a meeting, packed and, there, unpacked.

A frame of all ranks gives its meeting and the first one of the call, then, rank by rank, header, text, counts of calls,
and spans of staging memory with the data in them. A frame of data alone has, rank by rank, spans with their data.
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
_DATA = struct.Struct("<QQII")  # meeting, the call's first; how much later it is due; ranks in the frame
_RANK_DATA = struct.Struct("<II")  # rank, spans
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

    def of_data(
        self, staged: Sequence[tuple[int, Described]], meeting: int, first: int, late: int = 0
    ) -> list[bytes | memoryview]:
        """The parts of a frame with what some ranks of this host have staged, due ``late`` meetings later."""
        parts: list[bytes | memoryview] = [_DATA.pack(meeting, first, late, len(staged))]
        for rank, spans in staged:
            parts += [_RANK_DATA.pack(rank, spans.spans) + spans.packed, *(self._view[each] for each in spans.slices)]
        return parts

    @staticmethod
    def head(body: memoryview) -> tuple[int, int, int, int]:
        """Of a host's frame: meeting, the call's first, whether ranks that sleep are woken, ranks in the frame."""
        return _HEAD.unpack_from(body)

    @staticmethod
    def head_of_data(body: memoryview) -> tuple[int, int, int, int]:
        """Of a frame of data: meeting, the call's first, how much later it is due, ranks in the frame."""
        return _DATA.unpack_from(body)

    def unpack(self, peer: int, body: memoryview, meeting: int, count: int) -> list[int]:
        """Writes a frame of the ranks of ``peer``'s host; returns these ranks."""
        segment, field, at, ranks = self._segment, self._segment.field, _HEAD.size, []
        for _ in range(count):
            rank, header, text, spans, issued, completed = _RANK.unpack_from(body, at)
            self._check(peer, rank)
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

    def unpack_data(self, peer: int, body: memoryview, count: int) -> list[int]:
        """Writes a frame of data of ranks of ``peer``'s host; returns these ranks."""
        at, ranks = _DATA.size, []
        for _ in range(count):
            rank, spans = _RANK_DATA.unpack_from(body, at)
            self._check(peer, rank)
            at = self._write(rank, body, at + _RANK_DATA.size, spans)
            ranks.append(rank)
        return ranks

    def _check(self, peer: int, rank: int) -> None:
        """Raises `RuntimeError` if ``peer`` does not speak for ``rank``."""
        if not (0 <= rank < self._board.size and self._hosts.of[rank] == self._hosts.of[peer]):
            raise RuntimeError(f"rank {peer} sent something for rank {rank}, which is not on its host")

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
