"""Calls on several CUDA tensors, as kernels take them: lists, of gather and scatter too, and coalesced calls.

Kernels take every tensor of a list where it is. The tensors of a coalesced call are copied side by side before it and
to their places after it, in the order of the stream, as torch's NCCL backend does; those that lie side by side are used
where they are. Only what is even goes this way. Whether it is all ranks know by their own tensors, since these calls
want equal sizes; the exception is all_to_all: of lists, and of splits, a rank does not know those between two others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

import torch

from unisono.backend.tensors import PLAIN, check_memory
from unisono.errors import UsageError
from unisono.gpu.kernels import GpuCall, moved_as, reduces_on_gpu
from unisono.runtime.call import name_of_dtype
from unisono.runtime.reduce import op_and_factor

__all__ = ["LISTED", "FlatCall", "ListCall", "disjoint", "flat_call", "list_call", "lists_of"]

Tensors = Sequence[torch.Tensor]
LISTED = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "gather": "gather", "scatter": "scatter"}
"""The collectives of methods on lists that kernels serve."""


@dataclass(frozen=True, slots=True)
class ListCall:
    """``shape``: of the call as kernels take it; ``extra``: the reduce op's code, or the root.

    ``as_they_are``: kernels may take the tensors; otherwise copies, for some have gaps, or share memory.
    """

    shape: GpuCall
    extra: Any
    inputs: Tensors
    outputs: Tensors
    as_they_are: bool


def lists_of(name: str, arguments: Sequence[Any], rank: int) -> tuple[Any, Tensors, Tensors] | None:
    """The reduce op's code, or the root, of a call on lists, its inputs and outputs; None for other arguments, or none.

    ``name``: of `LISTED`. Of gather and scatter the root alone has a list.
    """
    if len(arguments) != 3 or not hasattr(arguments[2], "asyncOp"):
        return None
    outputs, inputs, options = arguments
    if not (outputs or name == "gather") or not (inputs or name == "scatter"):
        return None
    if name == "gather":
        root = options.rootRank
        return root, inputs, outputs[0] if outputs and rank == root else ()
    if name == "scatter":
        root = options.rootRank
        return root, inputs[0] if inputs and rank == root else (), outputs
    if name == "allgather":
        return None, inputs, outputs[0]
    return hash(options.reduceOp), inputs[0], outputs


def disjoint(places: Sequence[int], nbytes: int) -> bool:
    """True unless tensors of so many bytes at these addresses share memory otherwise than by being the same."""
    at = sorted({*places})
    return len(at) == 1 or min(map(sub, at[1:], at)) >= nbytes


def list_call(
    name: str, arguments: Sequence[Any], rank: int, size: int, by: str = "", chunks: int = 1
) -> ListCall | None:
    """The call on lists; None for what only NCCL takes. ``name``: of `LISTED`; ``by``, ``chunks``: of an algorithm
    chosen by name.

    Raises `UsageError` for lists of the root that do not fit what the others give.
    """
    found = lists_of(name, arguments, rank)
    if found is None:
        return None
    options, (extra, inputs, outputs) = arguments[2], found
    own, listed, what = (outputs[0], inputs, "inputs") if "scatter" in name else (inputs[0], outputs, "outputs")
    root = options.rootRank if name in ("gather", "scatter") else -1
    if not _even([own], own, [own.numel()]):
        return None
    if root in (-1, rank) and not _even(listed, own, [own.numel()] * size):
        if root < 0:
            return None
        raise _unfit(name, what, listed, own, size)
    collective, dtype = LISTED[name], name_of_dtype(own.dtype)
    if name == "reduce_scatter":
        if not _reduced(options, own):
            return None
        shape = GpuCall(collective, dtype, own.numel(), op_and_factor(options.reduceOp)[0], 0, by, chunks, True)
    else:
        moved, count = moved_as(own.dtype.itemsize, own.numel())
        shape = GpuCall(collective, moved, count, "", max(root, 0), by, chunks, True)
    tensors = (*inputs, *outputs)
    whole = all(tensor.is_contiguous() for tensor in tensors)
    as_they_are = whole and disjoint([tensor.data_ptr() for tensor in tensors], own.nbytes)
    return ListCall(shape, extra, inputs, outputs, as_they_are)


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


def flat_call(name: str, arguments: Sequence[Any], size: int) -> FlatCall | None:
    """The call on one tensor of a coalesced one; None for others, and for what only NCCL takes. ``name``: canonical."""
    make = _FORMS.get(name)
    return make(arguments, size) if make else None


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


def _unfit(name: str, what: str, found: Tensors, like: torch.Tensor, size: int) -> UsageError:
    words = ", ".join(f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)}" for tensor in found[:size]) or "none"
    wanted = f"{size} of {like.numel()} elements of {name_of_dtype(like.dtype)}"
    return UsageError(f"{name} on GPUs needs {what} alike, {wanted}, not {words}")


def _all_reduce_coalesced(arguments: Sequence[Any], size: int) -> FlatCall | None:
    tensors, options = arguments[0], arguments[1]
    if not _several(tensors, [t.numel() for t in tensors]) or not _reduced(options, tensors[0]):
        return None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return FlatCall("allreduce", nbytes, tensors, lambda: [[_flat(tensors)]], lambda flat: _spread(flat[0][0], tensors))


def _all_gather_coalesced(arguments: Sequence[Any], size: int) -> FlatCall | None:
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


def _reduce_scatter_coalesced(arguments: Sequence[Any], size: int) -> FlatCall | None:
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


_FORMS: dict[str, Callable[[Sequence[Any], int], FlatCall | None]] = {
    "allreduce_coalesced": _all_reduce_coalesced,
    "all_gather_single_coalesced": _all_gather_coalesced,
    "allgather_coalesced": _all_gather_coalesced,
    "reduce_scatter_single_coalesced": _reduce_scatter_coalesced,
}
