"""The fast path: calls on ordinary tensors, prepared once per kind and issued with as little Python as possible.

Both paths write the same bytes to the same places of the board. The fast path checks no argument again and makes no
task. Tensors that are not contiguous, and mistakes, take the general path (data_ops.py, reduce_ops.py).
"""

from collections.abc import Callable
from operator import sub
from typing import Any

import torch

from unisono.backend.data_ops import DataOps
from unisono.backend.operations import Builder, Tensors
from unisono.backend.options import chosen
from unisono.backend.reduce_ops import ReduceOps
from unisono.backend.tensors import ordinary
from unisono.errors import UsageError
from unisono.runtime.message import PreparedMessage, prepare_message
from unisono.runtime.prepared import AddressTable, Prepared, Preparer
from unisono.transport.inference import outside_inference

__all__ = ["FastPath", "KindMaker"]

_KEPT = 2048  # kinds of calls kept for reuse

KindMaker = Callable[[Any, torch.Tensor, torch.Tensor, Any], Prepared | None]
_Placed = torch.Tensor | AddressTable


class FastPath:
    """Prepared calls of one rank in one group, by kind; None if a call needs the general path."""

    def __init__(self, operations: Builder, preparer: Preparer) -> None:
        self._ops, self._rank, self._size = operations, operations.rank, operations.size
        self._kinds: dict[Any, Prepared | None] = {}
        self._messages: dict[Any, PreparedMessage] = {}
        preparer.subscribe(self._forget)

    def _forget(self) -> None:
        """Drops all prepared calls: a faster interpreter is there."""
        self._kinds = {}

    def prepared(self, make: KindMaker, key: Any, output: torch.Tensor, tensor: torch.Tensor) -> Prepared | None:
        """The call that ``make`` prepares for these tensors and ``key``; None unless the tensors are ordinary."""
        alike = output is tensor  # in place: half of the checks
        if not ordinary(output) or not (alike or ordinary(tensor)):
            return None
        options = chosen(self._ops.options)
        whole: tuple[Any, ...] = (make, key, output.dtype, output.shape, options.key if options is not None else None)
        if not alike:
            whole = (*whole, tensor.dtype, tensor.shape)
        try:
            return self._kinds[whole]
        except KeyError:
            return self._make(whole, make, output, tensor, key)

    @outside_inference
    def _make(self, whole: Any, make: Callable[..., Prepared | None], *given: Any) -> Prepared | None:
        kinds = self._kinds  # another thread may replace it meanwhile
        if len(kinds) >= _KEPT:
            kinds.clear()
        try:
            found = make(self._ops, *given)
        except UsageError:
            found = None  # refused on the general path, which notifies the peers
        kinds[whole] = found
        return found

    def barrier(self) -> Prepared | None:
        """The prepared barrier."""
        options = chosen(self._ops.options)
        whole = ("barrier", options.key if options is not None else None)
        try:
            return self._kinds[whole]
        except KeyError:
            return self._make(whole, lambda ops: ops.prepare(ops.barrier_call(), torch.uint8, (0,)))

    def message(self, op: str, tensor: torch.Tensor, tag: int) -> PreparedMessage | None:
        """The prepared send or recv of ``tensor``; None unless the tensor is ordinary."""
        if not ordinary(tensor):
            return None
        key = (op, tensor.dtype, tensor.shape, tag)
        try:
            return self._messages[key]
        except KeyError:
            if len(self._messages) >= _KEPT:
                self._messages.clear()
            found = self._messages[key] = prepare_message(self._ops.call(op, tensor), tag, tensor.nbytes)
            return found

    def lists(self, op: str, key: Any, outputs: Tensors, inputs: Tensors) -> tuple[Prepared, _Placed, _Placed] | None:
        """The prepared call on lists of tensors of one dtype and shape, its output and its input.

        ``key``: the reduce op, or the root, or None. ``outputs``, ``inputs``: one per rank, or one, or none. Lists of
        several shapes take the general path.
        """
        tensors = [*outputs, *inputs]
        if not tensors:
            return None
        first, options = tensors[0], chosen(self._ops.options)
        for tensor in tensors:
            if not ordinary(tensor) or tensor.dtype != first.dtype or tensor.shape != first.shape:
                return None
        make, listed = _MAKERS[op]
        how = options.key if options is not None else None
        whole = (op, key, first.dtype, first.shape, len(outputs), len(inputs), how)
        try:
            found = self._kinds[whole]
        except KeyError:
            found = self._make(whole, make, outputs, inputs, key)
        if found is None or not self._disjoint(outputs, inputs, first.nbytes):
            return None
        target = AddressTable(outputs) if listed[1] and outputs else tensors[0]
        return found, target, AddressTable(inputs) if listed[0] and inputs else tensors[-1]

    def _disjoint(self, outputs: Tensors, inputs: Tensors, nbytes: int) -> bool:
        """Returns True if no output shares memory with another, or with an input other than the rank's own piece.

        False, too, if one has no memory.
        """
        into, out = [t.data_ptr() for t in outputs], [t.data_ptr() for t in inputs]
        if not all(into) or not all(out):  # empty, or freed: refused on the general path
            return False
        if len(into) > 1:
            ordered = sorted(into)
            if min(map(sub, ordered[1:], ordered)) < nbytes:
                return False
        if not into or not out or max(into) + nbytes <= min(out) or max(out) + nbytes <= min(into):
            return True
        own, mine = into[self._rank if len(into) > 1 else 0], out[self._rank if len(out) > 1 else 0]
        return all(abs(a - b) >= nbytes or a == b == own == mine for a in into for b in out)


_MAKERS: dict[str, tuple[Callable[..., Prepared | None], tuple[bool, bool]]] = {
    "all_gather": (DataOps.all_gather_lists, (False, True)),
    "all_to_all": (DataOps.all_to_all_lists, (True, True)),
    "reduce_scatter": (ReduceOps.reduce_scatter_lists, (True, False)),
    "gather": (DataOps.gather_lists, (False, True)),
    "scatter": (DataOps.scatter_lists, (True, False)),
}
"""The function that prepares a call, and whether its inputs and its outputs are one per rank."""
