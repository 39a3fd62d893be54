"""Calls on lists of CUDA tensors, of gather and scatter too, of one rank in one group: by kernels that take every
tensor where it is, known again when they are called again.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.backend.device_lists import LISTED, disjoint, list_call, lists_of
from unisono.backend.device_work import LaunchedWork
from unisono.backend.options import chosen
from unisono.backend.work import DONE
from unisono.runtime.call import Call

if TYPE_CHECKING:
    from unisono.backend.device_calls import DeviceCalls, Kind

__all__ = ["LISTED", "ListCalls"]

_KEPT = 2048
Tensors = Sequence[torch.Tensor]


class ListCalls:
    """``calls``: those of the group on GPUs."""

    def __init__(self, calls: "DeviceCalls") -> None:
        self._calls, self._rank, self._size = calls, calls.group.rank, calls.group.size
        self._options = calls.group.options
        self._kinds: dict[Any, Kind] = {}

    def again(self, name: str, arguments: Sequence[Any]) -> Any:
        """The Work of a call of a kind that was made before; None if it is to go by `DeviceCalls.call`."""
        if (found := lists_of(name, arguments, self._rank)) is None or not self._kinds:
            return None
        extra, inputs, outputs = found
        tensors = (*inputs, *outputs)
        first, places, bits, index = tensors[0], [], 0, self._calls.index
        dtype, shape = first.dtype, first.shape
        for tensor in tensors:
            at = tensor.data_ptr()
            if not at or tensor.get_device() != index or not tensor.is_contiguous():
                return None
            if tensor is not first and (tensor.dtype != dtype or tensor.shape != shape):
                return None
            bits |= at
            places.append(at)
        kind = self._kinds.get(self._key(name, extra, inputs, outputs, bits))
        if kind is None or self._calls.failed() or not disjoint(places, first.nbytes):
            return None
        if kind[0] is None:
            return self._calls.by_nccl(kind, name, arguments)
        return self._launched(kind, inputs, outputs, places, arguments[2].asyncOp)

    def launched(self, name: str, arguments: Sequence[Any], call: Call) -> Any:
        """The Work of a call, of `LISTED`, that kernels serve; None for any other."""
        calls, (by, chunks) = self._calls, self._calls.named(call)
        found = list_call(name, arguments, self._rank, self._size, by, chunks)
        if found is None:
            return None
        if calls.kernels is None or calls.kernels.schedule(found.shape) is None:
            if found.as_they_are and not by:
                self._keep(name, found.extra, found.inputs, found.outputs, calls.kind(call, None))
            return None
        inputs, outputs = found.inputs, found.outputs
        if not found.as_they_are:
            with torch.no_grad():
                inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
                outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in outputs]
        places = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
        aligned = all(at % 16 == 0 for at in places)
        launch = calls.prepared(found.shape, call, aligned)
        assert launch is not None
        kind = calls.kind(call, launch)
        if found.as_they_are:
            self._keep(name, found.extra, inputs, outputs, kind)
        work = self._launched(kind, inputs, outputs, places, arguments[2].asyncOp)
        if outputs and not found.as_they_are:
            with torch.no_grad():
                torch._foreach_copy_(list(found.outputs), list(outputs))
        return work

    def _launched(self, kind: "Kind", inputs: Tensors, outputs: Tensors, places: list[int], asynchronous: bool) -> Any:
        """The Work of a launch; a kernel takes one input and one output at least."""
        given = places if inputs and outputs else [*places, places[0]]
        stream = self._calls.launch(kind, *given)
        if not asynchronous:
            return DONE
        return LaunchedWork(list(outputs or inputs), stream, self._calls.raise_failure)

    def _key(self, name: str, extra: Any, inputs: Tensors, outputs: Tensors, bits: int) -> Any:
        """The key of a kind of call on tensors that are all alike; ``bits``: of their addresses."""
        options, like = chosen(self._options), (inputs or outputs)[0]
        by = options.key if options is not None else None
        return name, extra, len(inputs), len(outputs), like.dtype, like.shape, bits & 15, by

    def _keep(self, name: str, extra: Any, inputs: Tensors, outputs: Tensors, kind: "Kind") -> None:
        """From now on the kind of call is known again."""
        if len(self._kinds) >= _KEPT:
            self._kinds.clear()
        bits = 0
        for tensor in (*inputs, *outputs):
            bits |= tensor.data_ptr()
        self._kinds[self._key(name, extra, inputs, outputs, bits)] = kind
