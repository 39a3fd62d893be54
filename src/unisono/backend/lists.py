"""Calls on lists of tensors by compiled loops: one dtype, one shape, each tensor side by side in memory.

As with the express (express.py) a rank may come this way while its peers take the long one (moving.py, reducing.py),
which also takes lists of several shapes. Where only the root has a list, each rank knows what the headers of all must
be, and the loops compare them with that.
"""

from collections.abc import Callable
from operator import sub
from typing import Any

import torch

from unisono.backend.moving import Moving
from unisono.backend.operations import Tensors
from unisono.backend.options import chosen
from unisono.backend.reducing import Reducing
from unisono.backend.tensors import ordinary
from unisono.run.desk import Desk, Order, Places
from unisono.run.fused_words import INPUTS, OUTPUTS
from unisono.watch.call import Call, piece

__all__ = ["Lists"]

_KEPT = 256  # orders kept for reuse

_Placed = torch.Tensor | Places
_Pieces = tuple[int, ...]


class Lists:
    """Orders of one rank in one group."""

    def __init__(self, moving: Moving, reducing: Reducing, desk: Desk) -> None:
        self._moving, self._reducing, self._desk = moving, reducing, desk
        self._rank, self._size = moving.rank, moving.size
        self._orders: dict[Any, Order | None] = {}
        desk.tell(self._forget)

    def _forget(self) -> None:
        """Begins anew, with what the desk offers now."""
        self._orders = {}

    def order(self, op: str, key: Any, outputs: Tensors, inputs: Tensors) -> tuple[Order, _Placed, _Placed] | None:
        """The order for a call, its output and its input; None if the call takes the long way.

        ``key``: the reduce op, or the root, or None. ``outputs``, ``inputs``: one per rank, or one, or none.
        """
        tensors = [*outputs, *inputs]
        if not tensors or chosen(self._moving.options) is not None:
            return None
        first = tensors[0]
        for tensor in tensors:
            if not ordinary(tensor):
                return None
            if tensor.dtype != first.dtype or tensor.shape != first.shape:
                return None
        make, listed = _MAKERS[op]
        whole = (op, key, first.dtype, first.shape, len(outputs), len(inputs))
        try:
            found = self._orders[whole]
        except KeyError:
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            found = self._orders[whole] = make(self, outputs, inputs, key, listed)
        if found is None or not self._apart(outputs, inputs, first.nbytes):
            return None
        target = Places(outputs) if listed & OUTPUTS and outputs else tensors[0]
        return found, target, Places(inputs) if listed & INPUTS and inputs else tensors[-1]

    def _apart(self, outputs: Tensors, inputs: Tensors, nbytes: int) -> bool:
        """Whether no output shares memory with another, or with an input but for a rank's own piece, one and the same.

        Nor has any none.
        """
        into, out = [t.data_ptr() for t in outputs], [t.data_ptr() for t in inputs]
        if not all(into) or not all(out):  # empty, or freed: that is refused the long way
            return False
        if len(into) > 1:
            ordered = sorted(into)
            if min(map(sub, ordered[1:], ordered)) < nbytes:
                return False
        if not into or not out or max(into) + nbytes <= min(out) or max(out) + nbytes <= min(into):
            return True
        own, mine = into[self._rank if len(into) > 1 else 0], out[self._rank if len(out) > 1 else 0]
        return all(abs(a - b) >= nbytes or a == b == own == mine for a in into for b in out)

    def _fits(self, tensors: Tensors) -> bool:
        return len(tensors) == self._size

    def _all_gather(self, outputs: Tensors, inputs: Tensors, _: None, listed: int) -> Order | None:
        """Every rank's input into the outputs of all."""
        if not self._fits(outputs):
            return None
        tensor, call = inputs[0], self._moving.all_gather_call(outputs, inputs[0])
        return self._desk.order("ALL_GATHER", call, tensor.dtype, tensor.nbytes, listed=listed)

    def _all_to_all(self, outputs: Tensors, inputs: Tensors, _: None, listed: int) -> Order | None:
        """Input j of rank i into output i of rank j."""
        if not self._fits(outputs) or not self._fits(inputs):
            return None
        tensor, call = inputs[0], self._moving.all_to_all_call(outputs, inputs)
        return self._desk.order("ALL_TO_ALL", call, tensor.dtype, tensor.nbytes, listed=listed)

    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, op: str, listed: int) -> Order | None:
        """The combination of all ranks' inputs r into the output of rank r."""
        if not self._fits(inputs):
            return None
        tensor, call = inputs[0], self._reducing.reduce_scatter_call(inputs, op)
        return self._desk.order("REDUCE_SCATTER", call, tensor.dtype, tensor.nbytes, op, listed=listed)

    def _gather(self, outputs: Tensors, inputs: Tensors, root: int, listed: int) -> Order | None:
        """Every rank's input into the outputs of the root."""
        at_root = self._rank == root
        if root not in range(self._size) or at_root != bool(outputs) or (at_root and not self._fits(outputs)):
            return None
        tensor, call = inputs[0], self._moving.gather_call(outputs, inputs[0], root)
        each, to_root, none = self._pieces(tensor, root)
        everybody = [_sized(call, to_root, each if r == root else none) for r in range(self._size)]
        return self._desk.order(
            "GATHER", call, tensor.dtype, tensor.nbytes, root=root, listed=listed, everybody=everybody
        )

    def _scatter(self, outputs: Tensors, inputs: Tensors, root: int, listed: int) -> Order | None:
        """Input r of the root into the output of rank r."""
        at_root = self._rank == root
        if root not in range(self._size) or at_root != bool(inputs) or (at_root and not self._fits(inputs)):
            return None
        output, call = outputs[0], self._moving.scatter_call(outputs[0], inputs, root)
        each, from_root, none = self._pieces(output, root)
        everybody = [_sized(call, each if r == root else none, from_root) for r in range(self._size)]
        return self._desk.order(
            "SCATTER", call, output.dtype, output.nbytes, root=root, listed=listed, everybody=everybody
        )

    def _pieces(self, tensor: torch.Tensor, root: int) -> tuple[_Pieces, _Pieces, _Pieces]:
        """The `piece` of a tensor for every rank, for the root alone, for nobody."""
        number = piece(tensor.shape)
        return (number,) * self._size, tuple(number * (r == root) for r in range(self._size)), (0,) * self._size


def _sized(call: Call, sends: _Pieces, expects: _Pieces) -> Call:
    """The same call of a rank that sends and expects other pieces."""
    return Call(call.op, call.dtype, root=call.root, sends=sends, expects=expects)


_MAKERS: dict[str, tuple[Callable[[Lists, Tensors, Tensors, Any, int], Order | None], int]] = {
    "all_gather": (Lists._all_gather, OUTPUTS),
    "all_to_all": (Lists._all_to_all, OUTPUTS | INPUTS),
    "reduce_scatter": (Lists._reduce_scatter, INPUTS),
    "gather": (Lists._gather, OUTPUTS),
    "scatter": (Lists._scatter, INPUTS),
}
"""What makes an order, and which of its outputs and inputs are one per rank."""
