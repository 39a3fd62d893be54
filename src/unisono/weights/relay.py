"""The movement of an update through a group: between hosts, and where one rank can not map another's memory.

Chunks go the way of the plan's schedule, one after the other; a rank that forwards sends on what it has received. Two
messages each: the rows of the table (movement.py), then what is packed. Halves of a bucket alternate, so that one is
sent while the other is packed, or unpacked.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.weights.lineup import Lineup
from unisono.weights.movement import Movement
from unisono.weights.source import Packing, Source
from unisono.weights.terms import PACKED, GroupFailed, Numbers, Terms
from unisono.weights.windows import Window

__all__ = ["Relay"]


class Relay(Movement):
    """As `Movement`, over messages."""

    slots = 2

    def __init__(self, lineup: Lineup, group: Any) -> None:
        super().__init__(lineup, group, limit=1 << 62)
        self.publishing, self.past, self.puts = None, False, False

    def memory(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory."""
        return torch.empty(*size, dtype=dtype)

    def prepare(self) -> None:
        """Finds the way of each chunk, and memory for those that this rank receives."""
        self._parent: dict[int, int] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for step in self.plan.schedule.steps:
            for transfer in step:
                for chunk in range(transfer.chunk, transfer.chunk + transfer.count):
                    if transfer.dst == self.rank:
                        self._parent[chunk] = transfer.src
                    if transfer.src == self.rank:
                        self._children[chunk].append(transfer.dst)
        received = [self.plan.chunks[chunk].nbytes for chunk in self._parent]
        self._bucket = torch.empty(2, max(received, default=0), dtype=torch.uint8)
        self._sending: list[list[Any]] = [[], []]
        self._waiting = self._broken_off = False
        for source, windows in enumerate(self.windows):
            count = windows[-1].stop if windows else 0
            own = self.source.table if self.source is not None and source == self.rank else None
            self.tables[source] = np.zeros((count, 2), dtype=np.int64) if own is None else own
        self.shared = True

    def hand_over(self, source: Source, packing: Packing, terms: Terms, summing: bool) -> None:
        """Packs a source's chunks and sends them."""
        table = source.table
        table[table[:, 0] >= 0, 0] = PACKED
        if terms.tables:
            if summing and terms.checksum:
                source.sum_all(packing, table[:, 1])
            for window in source.windows:
                self._post(0, self._children[window.chunk], window.chunk, table[window.first : window.stop])
        for window in source.windows:
            half = window.number & 1
            self._settle(half)
            rows = table[window.first : window.stop]
            packed = source.pack(window, packing, source.bucket[half], summing and terms.checksum and not terms.tables)
            if not terms.tables:
                self._post(half, self._children[window.chunk], window.chunk, rows)
            self._post_data(half, self._children[window.chunk], window.chunk, source.bucket[half][:packed])
        self._settle(0)
        self._settle(1)

    def fetch(self, target: Any, reader: Any, terms: Terms) -> None:
        """Receives a target's chunks, and sends on those that others await from it."""
        windows = sorted(target.windows.items(), key=lambda each: each[1].chunk)
        if terms.tables:
            for key, window in windows:
                self._receive_rows(key[0], window, 0)
            steps: list[list[Window]] = [[] for _ in self.windows]
            for key, window in windows:
                steps[key[0]].append(window)
            reader.begin(steps)
        for number, (key, window) in enumerate(windows):
            half = number & 1
            self._settle(half)
            if not terms.tables:
                self._receive_rows(key[0], window, half)
            rows = self.tables[key[0]][window.first : window.stop]
            nbytes = sum(item.nbytes for item, at in zip(window.items, rows[:, 0], strict=True) if at == PACKED)
            if nbytes:
                data = self._bucket[half][:nbytes]
                self._receive(self._parent[window.chunk], data, 2 * window.chunk + 1)
                self._post_data(half, self._children[window.chunk], window.chunk, data)
                reader.take(key, data)
        self._settle(0)
        self._settle(1)

    def _post(self, half: int, peers: list[int], chunk: int, rows: Numbers) -> None:
        """Sends rows of a table."""
        tensor = torch.from_numpy(np.ascontiguousarray(rows)).view(-1)
        for peer in peers:
            self._send(half, peer, tensor, 2 * chunk)

    def _post_data(self, half: int, peers: list[int], chunk: int, data: Tensor) -> None:
        for peer in peers if data.numel() else ():
            self._send(half, peer, data, 2 * chunk + 1)

    def _send(self, half: int, peer: int, tensor: Tensor, tag: int) -> None:
        self._sending[half].append((self._posted(self.group.send, tensor, peer, tag), tensor))

    def _settle(self, half: int) -> None:
        """Waits until what is sent from a half has gone."""
        while self._sending[half]:
            self._finish(self._sending[half].pop()[0])

    def _posted(self, post: Any, tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return post([tensor], peer, tag)
        except RuntimeError as error:
            raise GroupFailed(f"{type(error).__name__}: {error}") from error

    def _finish(self, work: Any) -> None:
        """Waits for a message, unless this movement was broken off."""
        self._waiting = True
        try:
            if not self._broken_off:
                work.wait()
        except RuntimeError as error:
            raise GroupFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._waiting = False
        if self._broken_off:
            raise GroupFailed("the update was given up meanwhile")

    def break_off(self) -> bool:
        """From another thread: the one that moves data stops; True once it does at most wait for a message."""
        self._broken_off = True
        return self._waiting

    def _receive_rows(self, source: int, window: Window, half: int) -> None:
        rows = self.tables[source][window.first : window.stop]
        self._receive(self._parent[window.chunk], torch.from_numpy(rows).view(-1), 2 * window.chunk)
        self._post(half, self._children[window.chunk], window.chunk, rows)

    def _receive(self, peer: int, tensor: Tensor, tag: int) -> None:
        self._finish(self._posted(self.group.recv, tensor, peer, tag))
