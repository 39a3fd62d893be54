"""Calls on several CUDA tensors as calls on one, which kernels take: lists, coalesced calls, gather and scatter.

Tensors are copied side by side before the call and to their places after it, in the order of the stream, as torch's
NCCL backend does with lists; outputs that lie side by side are used where they are. Only what is even goes this way.
Whether it is all ranks know by their own tensors, since these calls want equal sizes; the exception is all_to_all: of
lists, and of splits, a rank does not know those between two others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.backend.tensors import PLAIN, check_memory
from unisono.errors import UsageError
from unisono.gpu.kernels import reduces_on_gpu
from unisono.runtime.call import name_of_dtype
from unisono.runtime.reduce import op_and_factor

__all__ = ["FlatCall", "flat_call"]

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlatCall:
    """``name``: the method on one tensor; ``nbytes``: of its whole tensor; ``outputs``: the caller's.

    ``pack`` gives the arguments of that method but the options; ``deliver`` brings what it has filled to the outputs.
    """

    name: str
    nbytes: int
    outputs: list[torch.Tensor]
    pack: Callable[[], list[Any]]
    deliver: Callable[[list[Any]], None]


def flat_call(name: str, arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    """The call on one tensor; None for calls that have one anyway, and for what only NCCL takes. ``name``: canonical.

    Raises `UsageError` for lists of the root that do not fit what the others give.
    """
    make = _FORMS.get(name)
    return make(arguments, rank, size) if make else None


def _even(tensors: Tensors, like: torch.Tensor, numels: Sequence[int]) -> bool:
    """True for plain tensors on memory of the dtype of ``like`` and of so many elements each."""
    fits = len(tensors) == len(numels) and like.numel() > 0
    for tensor, numel in zip(tensors, numels, strict=False):
        fits = fits and tensor.dtype == like.dtype and tensor.numel() == numel
        fits = fits and type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_conj()
    for number, tensor in enumerate(tensors if fits else ()):
        check_memory(tensor, f"tensor {number}")
    return fits


def _reduced(options: Any, like: torch.Tensor) -> bool:
    return reduces_on_gpu(op_and_factor(options.reduceOp)[0], name_of_dtype(like.dtype))


def _flat(tensors: Tensors) -> torch.Tensor:
    """The elements of tensors, side by side: in place where they are so already."""
    found = _side_by_side(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if found is None else found


def _room(tensors: Tensors) -> torch.Tensor:
    """Memory for the elements of tensors: their own where they lie side by side."""
    total = sum(tensor.numel() for tensor in tensors)
    found = _side_by_side(tensors)
    return tensors[0].new_empty(total) if found is None else found


def _side_by_side(tensors: Tensors) -> torch.Tensor | None:
    """The memory of contiguous tensors of one storage, each of which begins where the one before ends."""
    first, at = tensors[0], tensors[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
        at += tensor.nbytes
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _spread(flat: torch.Tensor, outputs: Tensors) -> None:
    """Brings the elements of a flat tensor to the outputs, unless they are there."""
    if flat.data_ptr() != outputs[0].data_ptr():
        parts = torch.split(flat, [output.numel() for output in outputs])
        torch._foreach_copy_(list(outputs), [p.view(o.shape) for p, o in zip(parts, outputs, strict=True)])


def _all_gather(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    outputs, tensor = arguments[0][0], arguments[1][0]
    if not _even([tensor, *outputs], tensor, [tensor.numel()] * (size + 1)):
        return None
    return FlatCall(
        "all_gather_single", tensor.nbytes * size, outputs, lambda: [_room(outputs), tensor.contiguous()],
        lambda flat: _spread(flat[0], outputs),
    )  # fmt: skip


def _reduce_scatter(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    output, inputs, options = arguments[0][0], arguments[1][0], arguments[2]
    even = _even([output, *inputs], output, [output.numel()] * (size + 1))
    if not even or not _reduced(options, output):
        return None
    return FlatCall(
        "reduce_scatter_single", output.nbytes * size, [output], lambda: [_room([output]), _flat(inputs)],
        lambda flat: _spread(flat[0], [output]),
    )  # fmt: skip


def _gather(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    tensor, root = arguments[1][0], arguments[2].rootRank
    outputs = arguments[0][0] if arguments[0] and rank == root else []
    if not _even([tensor], tensor, [tensor.numel()]):
        return None
    if rank == root and not _even(outputs, tensor, [tensor.numel()] * size):
        raise _unfit("gather", "outputs", outputs, tensor, size)
    return FlatCall(
        "gather_single", tensor.nbytes * size, outputs or [tensor],
        lambda: [_room(outputs) if outputs else tensor.contiguous(), tensor.contiguous()],
        lambda flat: _spread(flat[0], outputs) if outputs else None,
    )  # fmt: skip


def _scatter(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    output, root = arguments[0][0], arguments[2].rootRank
    inputs = arguments[1][0] if arguments[1] and rank == root else []
    if not _even([output], output, [output.numel()]):
        return None
    if rank == root and not _even(inputs, output, [output.numel()] * size):
        raise _unfit("scatter", "inputs", inputs, output, size)

    def pack() -> list[Any]:
        room = _room([output])
        return [room, _flat(inputs) if inputs else room]

    return FlatCall(
        "scatter_single", output.nbytes * size, [output], pack, lambda flat: _spread(flat[0], [output])
    )  # fmt: skip


def _unfit(name: str, what: str, found: Tensors, like: torch.Tensor, size: int) -> UsageError:
    words = ", ".join(f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)}" for tensor in found[:size]) or "none"
    wanted = f"{size} of {like.numel()} elements of {name_of_dtype(like.dtype)}"
    return UsageError(f"{name} on GPUs needs {what} alike, {wanted}, not {words}")


def _all_reduce_coalesced(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    tensors, options = arguments[0], arguments[1]
    if not _several(tensors, [t.numel() for t in tensors]) or not _reduced(options, tensors[0]):
        return None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return FlatCall("allreduce", nbytes, tensors, lambda: [[_flat(tensors)]], lambda flat: _spread(flat[0][0], tensors))


def _all_gather_coalesced(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    """Outputs of each the pieces of all ranks; or, of `allgather_coalesced`, a list of outputs for every rank."""
    outputs, tensors = arguments[0], arguments[1]
    numels = [tensor.numel() for tensor in tensors]
    if not _several(tensors, numels):
        return None
    listed = bool(outputs) and not isinstance(outputs[0], torch.Tensor)
    rows = outputs if listed else [outputs]
    each = numels if listed else [numel * size for numel in numels]
    if len(rows) != (size if listed else 1) or not all(_even(row, tensors[0], each) for row in rows):
        return None

    def deliver(flat: list[Any]) -> None:
        gathered = torch.split(flat[0].view(size, -1), numels, 1)
        for k, columns in enumerate(gathered):
            if listed:
                for row, column in zip(rows, columns, strict=True):
                    row[k].copy_(column.view(row[k].shape))
            else:
                outputs[k].copy_(columns.reshape(outputs[k].shape))

    def pack() -> list[Any]:
        flat = _flat(tensors)
        return [flat.new_empty(size * flat.numel()), flat]

    nbytes = sum(tensor.nbytes for tensor in tensors) * size
    return FlatCall("all_gather_single", nbytes, [t for row in rows for t in row], pack, deliver)


def _reduce_scatter_coalesced(arguments: Sequence[Any], rank: int, size: int) -> FlatCall | None:
    outputs, tensors, options = arguments[0], arguments[1], arguments[2]
    numels = [output.numel() for output in outputs]
    if not _several(outputs, numels) or not _even(tensors, outputs[0], [numel * size for numel in numels]):
        return None
    if not _reduced(options, outputs[0]):
        return None

    def pack() -> list[Any]:
        flat = torch.cat([tensor.reshape(size, -1) for tensor in tensors], 1).view(-1)
        return [_room(outputs), flat]

    nbytes = sum(tensor.nbytes for tensor in tensors)
    return FlatCall("reduce_scatter_single", nbytes, outputs, pack, lambda flat: _spread(flat[0], outputs))


def _several(tensors: Tensors, numels: Sequence[int]) -> bool:
    return bool(tensors) and all(numels) and _even(tensors, tensors[0], numels)


_FORMS: dict[str, Callable[[Sequence[Any], int, int], FlatCall | None]] = {
    "allgather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "allreduce_coalesced": _all_reduce_coalesced,
    "all_gather_single_coalesced": _all_gather_coalesced,
    "allgather_coalesced": _all_gather_coalesced,
    "reduce_scatter_single_coalesced": _reduce_scatter_coalesced,
}
