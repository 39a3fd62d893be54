"""Tensors in memory that the other ranks of the host may map (shared_heap.py). Imports torch only when one is made."""

from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError, first_line
from unisono.transport.shared_heap import shared_heap

if TYPE_CHECKING:
    import torch

__all__ = ["empty"]


def empty(*size: Any, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    """A CPU tensor that the other ranks of this host read, and write, where it lies: large calls copy nothing in.

    ``size`` is given as to ``torch.empty``: integers, or one sequence of them; ``dtype`` is torch's default dtype if
    none is given. The tensor is an ordinary one, contiguous and uninitialised; each rank makes its own, whenever it
    likes, with a group or without one. Its views share the memory and count as shared too.

    Where the tensors that peers must read are all shared, an ``all_reduce``, ``reduce_scatter``, ``all_gather``,
    ``all_to_all`` or ``broadcast`` of more than about 128 KiB goes directly from tensor to tensor, with the same bits,
    checks and errors as otherwise; all_reduce and broadcast also write results into peers' tensors. Where some are not,
    or the system does not let one rank map another's memory, the same call goes through the staging areas as ever. Once
    such a call has failed (a lost peer, a timeout), the contents of its result are undefined, and a late peer may still
    write to it.

    The memory is page by page (4 KiB) this process's own file, of mode 0600 and without a name; it is given back when
    the tensor's storage dies. It can not be resized. A forked child has the same memory, not a copy. Where the system
    refuses such memory (``ulimit -v``, or more than the host has), the tensor is made by ``torch.empty``.

    Raises `UsageError` for a size or dtype that ``torch.empty`` refuses.

        gradients = unisono.empty(25_000_000)
        model_gradients.copy_(...)
        dist.all_reduce(gradients)
    """
    import torch

    try:
        like = torch.empty(*size, dtype=dtype, device="meta")
    except (TypeError, RuntimeError) as error:
        raise UsageError(f"unisono.empty: {first_line(error)}") from None
    memory = made.allocate(like.nbytes) if like.nbytes and (made := shared_heap()) is not None else None
    if memory is None:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    tensor = torch.empty(0, dtype=like.dtype, device="cpu")
    with torch.no_grad():
        return tensor.set_(raw.untyped_storage(), 0, like.shape, like.stride())
