"""all_to_all of rows whose numbers lie on the GPU, which torch's process groups have no method for: a group's `rows`.

`unisono.parallel.expert` asks for the kernel of a kind of call, and makes the call of torch's operations where there is
none, by way of the host.
"""

from typing import Any

import torch

from unisono.backend.caller_frame import keep_from_dynamo
from unisono.backend.device_calls import DeviceCalls, Kind
from unisono.backend.tensors import PLAIN
from unisono.errors import UsageError
from unisono.gpu.kernels import moved_as
from unisono.gpu.row_kernels import RowCall, prepare_rows
from unisono.runtime.call import Call, name_of_dtype

__all__ = ["RowCalls", "RowKernel"]

_KEPT = 1024


class RowKernel:
    """The kernel of a kind of call, as a function of tensors."""

    def __init__(self, calls: DeviceCalls, kind: Kind, capacity: int) -> None:
        self._calls, self._kind, self._capacity = calls, kind, capacity

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows received, filled up with zeros, and how many came from each rank."""
        x, counts = x.contiguous(), counts.contiguous()
        out, received = x.new_empty((self._capacity, *x.shape[1:])), torch.empty_like(counts)
        self._calls.launch(self._kind, x.data_ptr(), counts.data_ptr(), out.data_ptr(), received.data_ptr())
        return out, received


class RowCalls:
    """The calls of one rank in one group."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls
        self._kinds: dict[Any, RowKernel] = {}

    def kernel(self, x: torch.Tensor, counts: torch.Tensor, capacity: int, agreed: int) -> RowKernel | None:
        """The kernel for ``x`` [rows, ...] and int64 ``counts``, one per rank; None if no kernel serves the call.

        ``capacity``: rows of the output; ``agreed``: rows that are the same number on all ranks.
        """
        calls = self._calls
        place = x.data_ptr() & 15
        key = (x.shape, x.dtype, x.get_device(), type(x), counts.get_device(), place, capacity, agreed)
        if calls.served(x) and (found := self._kinds.get(key)) is not None:
            return found
        kernels = calls.ready("all_to_all_rows", [x, counts])
        numel = x.shape[1:].numel()
        if kernels is None or type(x) not in PLAIN or not numel * agreed:
            return None
        dtype, width = moved_as(x.dtype.itemsize, numel)
        words = f"{name_of_dtype(x.dtype)} rows of {list(x.shape[1:])}, {agreed} at most"
        call = Call("all_to_all", x.dtype, (agreed, *x.shape[1:]), extra_signature=words, args_text=words)
        kind = RowCall(dtype, width, agreed, len(x), capacity)
        try:
            launch = prepare_rows(kernels, kind, call.checksum, place == 0)
        except UsageError as error:
            calls.refuse("all_to_all_rows", error, x.device)
            raise
        if launch is None:
            return None
        if len(self._kinds) >= _KEPT:
            self._kinds.clear()
        found = self._kinds[key] = RowKernel(calls, calls.kind(call, launch), capacity)
        return found


keep_from_dynamo(RowKernel)
keep_from_dynamo(RowCalls)
