"""Cases of a measurement: buffers, inputs, expected outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unisono.bench.settings import DTYPES, VECTORS, Settings, block_count
from unisono.bench.values import Tables, fill, wrong
from unisono.transport.shared_tensor import empty

__all__ = ["Case"]


@dataclass
class Case:
    """One collective at one size on this rank: buffers, for a caller (torch_calls.py, mpi_calls.py) to make calls on.

    ``fill`` writes the known inputs, ``wrong`` counts wrong elements after a call.
    """

    settings: Settings
    collective: str
    requested: int
    rank: int
    tables: Tables

    def __post_init__(self) -> None:
        s, n = self.settings, self.settings.ranks
        self.place = s.place_of(self.collective)
        self.count = block_count(self.collective, self.requested, DTYPES[s.dtype], n)
        self.whole = self.count * (1 if self.collective in VECTORS else n)
        self.nbytes = self.whole * DTYPES[s.dtype]
        self.root, self._at_root = s.root, self.rank == s.root
        self._allocate()

    def _allocate(self) -> None:
        """The input and the output; in place one is (a part of) the other."""
        dtype, c, mine = getattr(torch, self.settings.dtype), self.collective, slice(self.rank * self.count, None)
        sends_whole = c in ("reduce_scatter", "all_to_all") or (c == "scatter" and self._at_root)
        takes_whole = c in ("all_gather", "all_to_all") or (c == "gather" and self._at_root)
        inputs, outputs = (self.whole if w or c in VECTORS else self.count for w in (sends_whole, takes_whole))
        shared = self.settings.memory == "shared"
        make: Callable[..., torch.Tensor] = empty if shared else partial(torch.empty, device=self.settings.device)
        if self.place == "out":
            self.input, self.output = make(inputs, dtype=dtype), make(outputs, dtype=dtype).zero_()
        elif c == "all_gather":
            self.output = make(outputs, dtype=dtype).zero_()
            self.input = self.output[mine][: self.count]
        else:
            self.input = make(inputs, dtype=dtype)
            self.output = self.input[mine][: self.count] if c == "reduce_scatter" else self.input

    def fill(self) -> None:
        """Writes this rank's known input."""
        if self.place == "out":
            self.output.zero_()
        fill(self.input, self.tables.inputs[self.rank])

    def wrong(self, output: torch.Tensor) -> int:
        """Wrong elements in ``output``, where this rank's result lies after one call on the filled input."""
        tables, n, count, c = self.tables, self.settings.ranks, self.count, self.collective
        if c == "all_reduce" or (c == "reduce" and self._at_root):
            return wrong(output, tables.reduced)
        if c == "broadcast":
            return wrong(output, tables.inputs[self.root])
        if c == "reduce_scatter":
            return wrong(output, tables.reduced, self.rank * count)
        if c == "scatter":
            return wrong(output, tables.inputs[self.root], self.rank * count)
        if c == "send_recv":
            return wrong(output, tables.inputs[(self.rank - 1) % n])
        if c in ("all_gather", "all_to_all") or (c == "gather" and self._at_root):
            first = self.rank * count if c == "all_to_all" else 0
            return sum(wrong(part, tables.inputs[r], first) for r, part in enumerate(output.chunk(n)))
        return 0

    def on_copy(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Out of place, calls that have one buffer are made on a copy, and the copy counts."""
        if self.place == "in":
            return call

        def copy_and_call() -> Any:
            self.output.copy_(self.input)
            return call()

        return copy_and_call
