"""Collectives fused with RMSNorm, which torch's process groups have no methods for: a group's `norms`, on GPUs.

`unisono.parallel.tensor` asks for the kernel of a kind of call, and makes the call of torch's operations where there is
none. Whether there is one depends on facts that are equal on all ranks.
"""

from typing import Any

import torch

from unisono.backend.caller_frame import keep_from_dynamo
from unisono.backend.device_calls import DeviceCalls, Kind
from unisono.backend.tensors import PLAIN
from unisono.errors import UsageError
from unisono.gpu.norm_kernels import NORMS, NormCall, prepare_norm
from unisono.runtime.call import Call, name_of_dtype

__all__ = ["NormCalls", "NormKernel"]

_KEPT = 1024


class NormKernel:
    """The kernel of a kind of call, as a function of tensors."""

    def __init__(self, calls: DeviceCalls, kind: Kind, collective: str, size: int) -> None:
        self._calls, self._kind, self._size = calls, kind, size
        self._scatters = collective.startswith("reduce_scatter")
        self._gathers = collective.endswith("all_gather")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm and the new residual; ``x`` itself where there is none."""
        x, gain = x.contiguous(), weight.contiguous()
        carried = x if residual is None else residual.contiguous()
        if self._gathers and not self._scatters:
            out = x.new_empty((x.shape[0] * self._size, *x.shape[1:]))
        else:
            out = torch.empty_like(x if self._gathers else carried)
        residual_out = x if residual is None else torch.empty_like(carried)
        self._calls.launch(
            self._kind, x.data_ptr(), carried.data_ptr(), gain.data_ptr(), out.data_ptr(), residual_out.data_ptr()
        )
        return out, residual_out


class NormCalls:
    """The calls of one rank in one group."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls
        self._kinds: dict[Any, NormKernel] = {}

    def kernel(
        self, collective: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> NormKernel | None:
        """The kernel of a collective of `gpu.norm_kernels.NORMS`; None if no kernel serves the call.

        ``x``: rows of hidden elements, in dim 0 those of all ranks where they are scattered; the shapes fit.
        """
        tensors = [x, weight] if residual is None else [x, weight, residual]
        places = 0
        for tensor in tensors:
            places |= tensor.data_ptr()
        key = (collective, x.shape, eps, places & 15, *[(t.dtype, t.get_device(), type(t)) for t in tensors])
        calls = self._calls
        if calls.by_name():
            return None
        if calls.served(x) and (found := self._kinds.get(key)) is not None:
            return found
        kernels = calls.ready(collective, tensors)
        if kernels is None or any(type(t) not in PLAIN or t.dtype != x.dtype for t in tensors):
            return None
        scatters, hidden = collective.startswith("reduce_scatter"), weight.numel()
        rows = x.numel() // hidden // (kernels.size if scatters else 1)
        operation = "reduce_scatter" if scatters else NORMS[collective][1]
        words = f"{name_of_dtype(x.dtype)} {list(x.shape)}, {collective}, eps {eps}"
        reduce_op = "" if operation == "all_gather" else "SUM"
        call = Call(operation, x.dtype, tuple(x.shape), reduce_op, extra_signature=words, args_text=words)
        kind = NormCall(collective, name_of_dtype(x.dtype), rows, hidden, eps)
        try:
            launch = prepare_norm(kernels, kind, call.checksum, places & 15 == 0)
        except UsageError as error:
            calls.refuse(collective, error, x.device)
            raise
        if launch is None:
            return None
        if len(self._kinds) >= _KEPT:
            self._kinds.clear()
        found = self._kinds[key] = NormKernel(calls, calls.kind(call, launch), collective, kernels.size)
        return found


keep_from_dynamo(NormKernel)
keep_from_dynamo(NormCalls)
