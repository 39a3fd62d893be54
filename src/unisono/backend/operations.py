"""Every collective: torch's arguments, checked and turned into a call, which peers compare, and its prepared programs.

A mistake in the arguments raises `UsageError`; the process group still lets that call meet its peers (`refused`), so
that they raise too instead of waiting. Calls are cached: training repeats itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from unisono.backend.options import Options, chosen
from unisono.backend.tensors import Result, overlap
from unisono.errors import UsageError
from unisono.runtime.call import Call, name_of_dtype, piece
from unisono.runtime.choice import MEASURED, Choice, by_default, by_hosts, by_measurement, by_name, table_mark
from unisono.runtime.collectives import Part
from unisono.runtime.prepared import AddressTable, Kind, Prepared, Preparer
from unisono.watch.exit_notes import short

__all__ = [
    "NOTHING",
    "Builder",
    "Operation",
    "Shape",
    "Tensors",
    "clone_if_overlapping",
    "same_dtype",
    "shapes",
    "unpack",
]

Tensors = Sequence[torch.Tensor]
Shape = Sequence[int]
_KEPT = 4096  # calls kept for reuse
NOTHING = AddressTable([])
"""The memory of a call that has none."""
_BY_MEASUREMENT = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
_PARTS_TEXT = 300  # characters of a call's parts that people read


@dataclass(slots=True)
class Operation:
    """A call ready to run: its programs, and functions that copy results to tensors that no program fills."""

    call: Call
    parts: list[Part]
    outputs: list[Any]
    deliver: list[Callable[[], object]] = field(default_factory=list)


class Builder:
    """The base of the builders of all operations: the ranks, the calls made and prepared before."""

    def __init__(
        self, preparer: Preparer, global_ranks: Sequence[int], oversubscribed: bool, options: Options | None = None
    ) -> None:
        self.preparer, self.rank, self.size, self.global_ranks = preparer, preparer.rank, preparer.size, global_ranks
        self.oversubscribed, self.options = oversubscribed, options
        self._measured = options is not None and options.select == "measured"
        self._exact = options is not None and options.deterministic
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        preparer.subscribe(self._forget)

    def _forget(self) -> None:
        """Drops all prepared calls: a faster interpreter is there."""
        self._prepared = {}

    def prepare(self, call: Call, dtype: torch.dtype, sizes: Sequence[int], **kind: Any) -> Prepared:
        """The call, prepared; the rest as in `Kind`. Cached with the call."""
        key = (id(call), dtype, kind.get("listed"), kind.get("guarded"), kind.get("completes"))
        kept = self._prepared  # another thread may replace it meanwhile
        found = kept.get(key)
        if found is None or found.call is not call:
            if len(kept) >= _KEPT:
                kept.clear()
            choice = self._choice(call, max(sizes, default=0) * dtype.itemsize)
            made = Kind(call, choice, dtype, tuple(sizes), **kind)
            found = kept[key] = self.preparer.prepare(made)
        return found

    def _choice(self, call: Call, nbytes: int) -> Choice:
        """The schedule of a call: by default, or of the algorithm that was chosen."""
        root = max(0, call.root)
        if call.refused:
            return by_default("barrier", 0, self.size, 0, self.oversubscribed)
        if call.algorithm.startswith(MEASURED):
            return by_measurement(call.op, nbytes, self.size, root, self._exact, self.oversubscribed)
        if not call.algorithm and (hosts := self.preparer.hosts):
            return by_hosts(call.op, nbytes, self.size, root, self.oversubscribed, hosts)
        if not call.algorithm:
            return by_default(call.op, nbytes, self.size, root, self.oversubscribed)
        options = chosen(self.options)
        assert options is not None
        return by_name(options.name_for(call.op), call.op, self.size, root, options.chunks, options.deterministic)

    def call(
        self, op: str, tensor: torch.Tensor, reduce_op: str = "", root: int = -1, extra_signature: str = "",
        parts: Tensors = (),
    ) -> Call:  # fmt: skip
        """The call for a tensor whose dtype and shape must agree on all ranks, and those of its ``parts``, if any."""
        by, kinds = self._algorithm(op), tuple((part.dtype, part.shape) for part in parts) if parts else ()
        key = (op, tensor.dtype, tensor.shape, reduce_op, root, extra_signature, kinds, by)
        call = self._calls.get(key)
        if call is None:
            words = several(parts) if parts else ""
            args_text = short(words, _PARTS_TEXT)
            shape, numels = tuple(tensor.shape), tuple(part.numel() for part in parts)
            call = Call(
                op, tensor.dtype, shape, reduce_op, root, extra_signature=extra_signature + words, algorithm=by,
                args_text=args_text, parts=numels,
            )  # fmt: skip
            self._keep(key, call)
        return call

    def _algorithm(self, op: str, pieces: bool = False) -> str:
        """The algorithm chosen for this call, in the words that ranks compare; nothing for the default.

        ``pieces``: whether sizes may differ by rank, so that no size that all ranks know could choose.
        """
        options = chosen(self.options)
        if op in ("send", "recv"):
            return ""
        if options is not None:
            return options.words_for(op)
        if pieces or not self._measured or op not in _BY_MEASUREMENT:
            return ""
        return f"{MEASURED} {table_mark()}{' in rank order' if self._exact else ''}"

    def moving(
        self,
        op: str,
        dtype: torch.dtype,
        sends: Sequence[Shape | None],
        expects: Sequence[Shape | None],
        words: Callable[[], str],
        root: int = -1,
    ) -> Call:
        """The call for pieces whose shapes may differ by rank; None where nothing goes between two ranks."""
        by = self._algorithm(op, pieces=True)
        key = (op, dtype, root, tuple(sends), tuple(expects), by)
        call = self._calls.get(key)
        if call is None:
            numbers = [tuple(0 if s is None else piece(s) for s in row) for row in (sends, expects)]
            call = Call(op, dtype, root=root, sends=numbers[0], expects=numbers[1], algorithm=by, args_text=words())
            self._keep(key, call)
        return call

    def _keep(self, key: tuple[Any, ...], call: Call) -> Call:
        if len(self._calls) >= _KEPT:
            self._calls.clear()
        self._calls[key] = call
        return call

    def refused(self, op: str, error: UsageError) -> Operation:
        """The call of a rank with wrong arguments: it meets the others, so that they raise, then raises."""
        return self._met(Call(op, refused=str(error)))

    def barrier(self) -> Operation:
        """All ranks come before any leaves."""
        return self._met(self.barrier_call())

    def barrier_call(self) -> Call:
        """The call of `barrier`."""
        by = self._algorithm("barrier")
        return self._calls.get(("barrier", by)) or self._keep(("barrier", by), Call("barrier", algorithm=by))

    def _met(self, call: Call) -> Operation:
        return Operation(call, [(self.prepare(call, torch.uint8, (0,)), NOTHING, NOTHING)], [])

    def check_rank(self, rank: int) -> None:
        """Raises `UsageError` unless ``rank``, a root or a peer, is one of this group."""
        if 0 <= rank < self.size:
            return
        hint = ""
        if rank in self.global_ranks:
            place = self.global_ranks.index(rank)
            hint = f"; {rank} is a global rank: give it as src or dst, or {place} as group_src or group_dst"
        raise UsageError(
            f"there is no group rank {rank} in a group of {self.size} ranks, 0 to {self.size - 1} (global ranks "
            f"{list(self.global_ranks)}){hint}"
        )

    def one_per_rank(self, tensors: Tensors, like: torch.Tensor, what: str) -> None:
        """Raises `UsageError` unless there is one tensor per rank, all of the dtype of ``like``."""
        if len(tensors) != self.size:
            raise UsageError(f"{len(tensors)} {what} for a group of {self.size} ranks: one per rank is needed")
        same_dtype(tensors, like, what)


def same_dtype(tensors: Tensors, like: torch.Tensor, what: str) -> None:
    """Raises `UsageError` unless all have the dtype of ``like``."""
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise UsageError(
                f"{what} of {name_of_dtype(tensor.dtype)} beside {name_of_dtype(like.dtype)}: use one dtype"
            )


def shapes(tensors: Tensors) -> str:
    """The shapes of several tensors, for people: ``[2] [3] [4]``, or ``4 x [2]`` where all are equal."""
    found = [str(list(t.shape)) for t in tensors]
    return f"{len(found)} x {found[0]}" if len(set(found)) == 1 else " ".join(found)


def several(tensors: Tensors) -> str:
    """Dtypes and shapes of several tensors, for people: ``3 tensors: float32 [2] [3], int64 [4]``."""
    runs = groupby(tensors, lambda tensor: tensor.dtype)
    words = [f"{name_of_dtype(dtype)} {' '.join(str(list(t.shape)) for t in run)}" for dtype, run in runs]
    return f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}: {', '.join(words)}"


def clone_if_overlapping(mine: torch.Tensor, others: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """``mine``, cloned if it overlaps a result; number ``own`` may be the same memory."""
    for rank, other in enumerate(others):
        if overlap(mine, other) and not (rank == own and mine.data_ptr() == other.data_ptr()):
            return mine.clone()
    return mine


def unpack(packed: torch.Tensor, results: Sequence[Result]) -> Callable[[], None]:
    """Brings the parts of a flat result to where they belong."""

    def deliver() -> None:
        for result, part in zip(results, torch.split(packed, [r.flat.numel() for r in results]), strict=True):
            result.flat.copy_(part)
            result.deliver()

    return deliver
