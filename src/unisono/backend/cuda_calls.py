"""The calls of torch's methods on CUDA tensors, as the guard compares them and as kernels take them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOptions

from unisono.backend.options import Options
from unisono.backend.tensors import PLAIN, check_memory, overlap
from unisono.errors import UsageError
from unisono.gpu.kernels import GpuCall, moved_as, reduces_on_gpu
from unisono.runtime.call import Call, name_of_dtype
from unisono.runtime.reduce import op_and_factor

__all__ = ["CANONICAL", "KNOWN_AGAIN", "call_of", "devices_of", "kernel_form", "key_of", "operation_of", "strided"]

CANONICAL = {
    "_allgather_base": "all_gather_single", "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single", "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}  # fmt: skip
"""Names of earlier torch releases, by which methods are called as well."""

KernelForm = tuple[GpuCall, torch.Tensor, torch.Tensor]
"""A call as kernels take it, its input and its output."""


def devices_of(arguments: Sequence[Any]) -> dict[torch.device, str]:
    """The devices of all tensors among a method's arguments, with a word on where the first of each stands."""
    found: dict[torch.device, str] = {}
    for number, argument in enumerate(arguments):
        _look(argument, f"argument {number}", found)
    return found


def _look(argument: Any, where: str, found: dict[torch.device, str]) -> None:
    if isinstance(argument, torch.Tensor):
        found.setdefault(argument.device, where)
    elif isinstance(argument, list | tuple):
        for k, one in enumerate(argument):
            if isinstance(one, torch.Tensor | list | tuple):
                _look(one, f"{where}, tensor {k}" if isinstance(one, torch.Tensor) else where, found)


def call_of(operations: Any, name: str, arguments: Sequence[Any]) -> Call:
    """The call that peers compare, of any method but those of messages. ``name``: canonical."""
    return _CALLS[name](operations, *arguments)


def _op(options: Any) -> str:
    return op_and_factor(options.reduceOp)[0]


def _all_to_all_single(
    ops: Any, output: torch.Tensor, tensor: torch.Tensor, out_splits: Any, in_splits: Any, *_: Any
) -> Call:
    if not out_splits and not in_splits:
        found: Call = ops.call("all_to_all", tensor, extra_signature="single")
        return found
    rows = [list(splits) or [t.shape[0] // ops.size] * ops.size
            for splits, t in ((in_splits, tensor), (out_splits, output))]  # fmt: skip
    per = [t[0].numel() if t.shape[0] else 1 for t in (tensor, output)]
    shapes = [[(row * per[k],) for row in rows[k]] for k in (0, 1)]
    moved: Call = ops.moving("all_to_all", tensor.dtype, shapes[0], shapes[1], lambda: f"splits {rows[0]} {rows[1]}")
    return moved


_CALLS: dict[str, Callable[..., Call]] = {
    "allreduce": lambda ops, tensors, opts: ops.call("all_reduce", tensors[0], _op(opts)),
    "allreduce_coalesced": lambda ops, tensors, opts: ops.call("all_reduce", tensors[0], _op(opts), parts=tensors),
    "reduce": lambda ops, tensors, opts: ops.call("reduce", tensors[0], _op(opts), opts.rootRank),
    "broadcast": lambda ops, tensors, opts: ops.call("broadcast", tensors[0], root=opts.rootRank),
    "allgather": lambda ops, outputs, tensors, *_: ops.all_gather_call(outputs[0], tensors[0]),
    "allgather_coalesced": lambda ops, outputs, tensors, *_: ops.call("all_gather", tensors[0], parts=tensors),
    "all_gather_single": lambda ops, output, tensor, *_: ops.call("all_gather", tensor, extra_signature="single"),
    "all_gather_single_coalesced": lambda ops, outputs, ts, *_: ops.call("all_gather", ts[0], parts=ts),
    "reduce_scatter": lambda ops, outputs, inputs, opts: ops.call(
        "reduce_scatter", inputs[0][0], _op(opts), parts=inputs[0]
    ),
    "reduce_scatter_single": lambda ops, output, tensor, opts: ops.call("reduce_scatter", tensor, _op(opts)),
    "reduce_scatter_single_coalesced": lambda ops, outputs, tensors, opts: ops.call(
        "reduce_scatter", tensors[0], _op(opts), parts=tensors
    ),
    "gather": lambda ops, outputs, tensors, opts: ops.gather_call(
        outputs[0] if outputs else [], tensors[0], opts.rootRank
    ),
    "scatter": lambda ops, outputs, inputs, opts: ops.scatter_call(
        outputs[0], inputs[0] if inputs else [], opts.rootRank
    ),
    "alltoall": lambda ops, outputs, inputs, *_: ops.all_to_all_call(outputs, inputs),
    "all_to_all_single": _all_to_all_single,
}


def kernel_form(name: str, arguments: Sequence[Any], size: int, by: str = "", chunks: int = 1) -> KernelForm | None:
    """The call as kernels take it; None if only NCCL takes it. ``by``, ``chunks``: of an algorithm chosen by name.

    Decided by facts that the header holds, or by the caller's own mistakes, for which NCCL has its words.
    """
    if name in ("allreduce", "broadcast", "reduce"):
        tensor, options = arguments[0][0], arguments[1]
        source, output, count = tensor, tensor, tensor.numel()
    elif name in ("gather_single", "scatter_single"):
        output, source, options = arguments
        count = source.numel() if name == "gather_single" else output.numel()
    elif name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        output, source, options = arguments[0], arguments[1], arguments[-1]
        swaps = name == "all_to_all_single"
        if swaps and (arguments[2] or arguments[3]):
            return None
        count = source.numel() if name == "all_gather_single" else source.numel() // size
        whole = {"all_gather_single": count * size, "reduce_scatter_single": count}.get(name, source.numel())
        uneven = name != "all_gather_single" and count * size != source.numel()
        uneven = uneven or (swaps and any(t.dim() and t.shape[0] % size for t in (source, output)))
        if source.dtype != output.dtype or output.numel() != whole or uneven:
            raise UsageError(
                f"{name} of {source.numel()} elements of {name_of_dtype(source.dtype)} over {size} ranks into "
                f"{output.numel()} of {name_of_dtype(output.dtype)}: sizes or dtypes do not fit"
            )
    else:
        return None
    if any(type(t) not in PLAIN or t.layout != torch.strided or not t.is_contiguous() for t in (source, output)):
        return None
    check_memory(source, "the tensor")
    check_memory(output, "the output")
    if name == "all_to_all_single" and overlap(source, output):
        source = source.clone()
    collective, reduces, dtype = _COLLECTIVES[name], name in _REDUCING, source.dtype
    root = options.rootRank if name in _ROOTED else 0
    if reduces:
        op, names = _op(options), name_of_dtype(dtype)
        if not reduces_on_gpu(op, names):
            return None
        return GpuCall(collective, names, count, op, root, by, chunks), source, output
    moved, each = moved_as(dtype.itemsize, count)
    return GpuCall(collective, moved, each, "", root, by, chunks), source, output


def operation_of(name: str) -> str:
    """The operation of a method, as headers name it: ``all_gather`` of ``all_gather_single``."""
    if name in ("send", "recv"):
        return name
    return next((op for start, op in _OPERATIONS.items() if name.startswith(start)), "recv")


def strided(name: str, arguments: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Input and output of a call with one of each, of which one is not contiguous; None for any other."""
    if name in ("allreduce", "broadcast", "reduce"):
        source = output = arguments[0][0]
    elif name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        output, source = arguments[0], arguments[1]
    else:
        return None
    if any(t.layout != torch.strided for t in (source, output)) or (source.is_contiguous() and output.is_contiguous()):
        return None
    return source, output


_OPERATIONS = {
    "allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "reduce": "reduce", "broadcast": "broadcast",
    "allgather": "all_gather", "all_gather": "all_gather", "gather": "gather", "scatter": "scatter",
    "alltoall": "all_to_all", "all_to_all": "all_to_all", "all_reduce": "all_reduce",
    "rms_norm_all_gather": "all_gather",
}  # fmt: skip
_COLLECTIVES = {
    "allreduce": "all_reduce", "broadcast": "broadcast", "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter", "all_to_all_single": "all_to_all", "reduce": "reduce",
    "gather_single": "gather", "scatter_single": "scatter",
}  # fmt: skip
_REDUCING = ("allreduce", "reduce_scatter_single", "reduce")
_ROOTED = ("broadcast", "reduce", "gather_single", "scatter_single")


def _all_reduce_form(tensors: Any, opts: Any = None, *_: Any) -> Any:
    if type(opts) is not AllreduceOptions:
        return None
    tensor = tensors[0]
    return hash(opts.reduceOp), tensor, tensor, opts


def _broadcast_form(tensors: Any, opts: Any = None, *_: Any) -> Any:
    if type(opts) is not BroadcastOptions:
        return None
    tensor = tensors[0]
    return opts.rootRank, tensor, tensor, opts


def _reduce_form(tensors: Any, opts: Any = None, *_: Any) -> Any:
    if type(opts) is not ReduceOptions:
        return None
    tensor = tensors[0]
    return (hash(opts.reduceOp), opts.rootRank), tensor, tensor, opts


def _reduce_scatter_form(output: Any, tensor: Any, opts: Any = None) -> Any:
    return (hash(opts.reduceOp), tensor, output, opts) if opts is not None else None


def _all_gather_form(output: Any, tensor: Any, opts: Any = None) -> Any:
    return (None, tensor, output, opts) if opts is not None else None


def _all_to_all_form(output: Any, tensor: Any, out_splits: Any, in_splits: Any, opts: Any = None) -> Any:
    if out_splits or in_splits or opts is None or overlap(tensor, output):
        return None
    return None, tensor, output, opts


KNOWN_AGAIN: dict[str, Callable[..., Any]] = {
    "allreduce": _all_reduce_form,
    "broadcast": _broadcast_form,
    "reduce": _reduce_form,
    "reduce_scatter_single": _reduce_scatter_form,
    "all_gather_single": _all_gather_form,
    "all_to_all_single": _all_to_all_form,
}
"""By method: the reduce op's code, the root or both, the input, the output, the options of a call, by which a kind of
call is known again; None for a form that never is."""


def key_of(
    name: str, extra: Any, source: torch.Tensor, output: torch.Tensor, places: int, options: Options | None
) -> Any:
    """The key of a kind of call: ``extra`` and the tensors as `KNOWN_AGAIN` gives them, the bits of their addresses,
    the options that count.
    """
    by = options.key if options is not None else None
    if output is source:
        return name, extra, source.dtype, source.shape, places & 15, by
    return name, extra, source.dtype, source.shape, places & 15, by, output.dtype, output.shape, output.get_device()
