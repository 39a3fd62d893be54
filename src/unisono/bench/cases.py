"""The calls: buffers of a given size, the call on them, what must come out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unisono.bench.bound import VECTORS, block_count
from unisono.bench.settings import DTYPES, Settings
from unisono.bench.values import FACTOR, Tables, fill, wrong
from unisono.torch_names import all_gather_single, reduce_scatter_single
from unisono.transport.shared_tensor import empty

__all__ = ["Case"]


@dataclass
class Case:
    """One collective at one size on this rank: buffers, ready to be called.

    ``fill`` writes the known inputs, ``call`` makes one call in ``group``, ``wrong`` counts wrong elements afterwards.
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
        make = empty if self.settings.memory == "shared" else torch.empty
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

    def call(self, group: Any, asynchronous: bool) -> Callable[[], Any]:
        """A function that makes one call and is back when it is done."""
        start = _CALLS[self.collective](self, group, asynchronous)
        if not asynchronous or self.collective == "send_recv":
            return start

        def start_and_wait() -> None:
            start().wait()

        return start_and_wait

    def wrong(self) -> int:
        """Wrong elements in this rank's output after one call on the filled input."""
        tables, n, count, c = self.tables, self.settings.ranks, self.count, self.collective
        if c == "all_reduce" or (c == "reduce" and self._at_root):
            return wrong(self.output, tables.reduced)
        if c == "broadcast":
            return wrong(self.output, tables.inputs[self.root])
        if c == "reduce_scatter":
            return wrong(self.output, tables.reduced, self.rank * count)
        if c == "scatter":
            return wrong(self.output, tables.inputs[self.root], self.rank * count)
        if c == "send_recv":
            return wrong(self.output, tables.inputs[(self.rank - 1) % n])
        if c in ("all_gather", "all_to_all") or (c == "gather" and self._at_root):
            first = self.rank * count if c == "all_to_all" else 0
            return sum(wrong(part, tables.inputs[r], first) for r, part in enumerate(self.output.chunk(n)))
        return 0


def _op(case: Case) -> Any:
    if case.settings.op == "premul_sum":
        return torch._C._distributed_c10d._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, case.settings.op.upper())


def _copied(case: Case, call: Callable[[], Any]) -> Callable[[], Any]:
    """Out of place, torch's in-place collectives are called on a copy, and the copy counts."""
    if case.place == "in":
        return call

    def copy_and_call() -> Any:
        case.output.copy_(case.input)
        return call()

    return copy_and_call


def _all_reduce(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    op, x = _op(case), case.output
    return _copied(case, lambda: dist.all_reduce(x, op, group, wait))


def _broadcast(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, root = case.output, case.root
    return _copied(case, lambda: dist.broadcast(x, root, group, wait))


def _reduce(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    op, x, root = _op(case), case.output, case.root
    return _copied(case, lambda: dist.reduce(x, root, op, group, wait))


def _reduce_scatter(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    op, x, y = _op(case), case.input, case.output
    return lambda: reduce_scatter_single(y, x, op, group, wait)


def _all_gather(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, y = case.input, case.output
    return lambda: all_gather_single(y, x, group, wait)


def _all_to_all(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, y = case.input, case.output
    return lambda: dist.all_to_all_single(y, x, None, None, group, wait)


def _gather(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, root = case.input, case.root
    parts = list(case.output.chunk(case.settings.ranks)) if case.rank == root else None
    return lambda: dist.gather(x, parts, root, group, wait)


def _scatter(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    y, root = case.output, case.root
    parts = list(case.input.chunk(case.settings.ranks)) if case.rank == root else None
    return lambda: dist.scatter(y, parts, root, group, wait)


def _barrier(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    return lambda: dist.barrier(group, wait)


def _send_recv(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    """To the next rank and from the one before, at the same time, as nccl-tests' sendrecv does."""
    x, y, rank, n = case.input, case.output, case.rank, case.settings.ranks
    after, before = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        return lambda: y.copy_(x)

    def exchange() -> None:
        works = [dist.isend(x, after, group), dist.irecv(y, before, group)]
        for work in reversed(works):
            if work is not None:  # which is what a rank outside the group gets
                work.wait()

    return exchange


_CALLS: dict[str, Callable[[Case, Any, bool], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "send_recv": _send_recv,
}
