"""all_to_all of rows whose numbers are a tensor: torch's all_to_all_single wants them as lists on the host.

The host of a GPU would have to wait for its router to make such lists, and no CUDA graph could hold the call. Here the
output has a fixed capacity, and a kernel reads the counts where they lie (docs/gpu.md). Where no kernel runs, on CPUs
and by other backends, the same is made of two calls of all_to_all_single.

With shapes that do not depend on the routing (GShard, Lepikhin et al. 2021, section 3.2) experts are one batched
product over the capacity; zeros fill what the routing leaves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import UsageError
from unisono.parallel.shards import Group, place

__all__ = ["all_to_all_rows"]

Kernel = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def all_to_all_rows(x: Tensor, counts: Tensor, capacity: int, *, group: Group = None) -> tuple[Tensor, Tensor]:
    """Sends the first `counts[0]` rows of `x` to rank 0 of the group, the next `counts[1]` to rank 1, and so on.

    `x` [rows, ...], any dtype; `counts` [world_size], int64, on the device of `x`. Gives the rows from all ranks in the
    order of ranks, [capacity, ...], and the number from each, [world_size], int64. What the rows received leave of the
    capacity is zeros; rows that exceed it are dropped, which `received.sum() > capacity` shows; rows that `x` does not
    have are sent as zeros. `capacity`, the dtype and the shape of a row must be the same on all ranks, `rows` need not.
    The call back, with `received` for `counts` and the rows of `x` for `capacity` (of the ranks' the most, where they
    differ), brings rows to where they came from.

    The gradient of `x` takes that way back, dropped rows and rows that were not sent get zeros.

    On GPUs by a kernel of any size, which waits for no host and can be captured in CUDA graphs. Elsewhere the host
    reads `counts`, and negative ones raise UsageError; a kernel takes them for 0. Raises UsageError for shapes and
    dtypes that do not fit, and in captures without kernels.
    """
    world_size = place(group).world_size
    if counts.shape != (world_size,) or counts.dtype != torch.int64:
        raise UsageError(
            f"counts must be int64 [{world_size}], a number per rank, not {counts.dtype} {list(counts.shape)}"
        )
    if x.dim() < 1 or counts.device != x.device:
        raise UsageError(
            f"x must be [rows, ...] on the device of counts, {counts.device}: {list(x.shape)} on {x.device}"
        )
    if capacity < 0:
        raise UsageError(f"capacity = {capacity}: must be the number of rows of the output, 0 or more")
    return _apply(x, counts, capacity, capacity, group)


def _apply(x: Tensor, counts: Tensor, capacity: int, agreed: int, group: Group) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and x.requires_grad:
        found: tuple[Tensor, Tensor] = _AllToAllRows.apply(x, counts, capacity, agreed, group)  # type: ignore[no-untyped-call]
        return found
    return _moved(x, counts, capacity, agreed, group)


class _AllToAllRows(torch.autograd.Function):
    """Its own transpose, with the counts received; ``agreed`` is the capacity of the call that the user made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, capacity: int, agreed: int, group: Group) -> tuple[Tensor, Tensor]:
        out, received = _moved(x, counts, capacity, agreed, group)
        ctx.save_for_backward(received)
        ctx.args = len(x), agreed, group
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        to_x, _ = _apply(gradient, *ctx.saved_tensors, *ctx.args)
        return to_x, None, None, None, None


def _moved(x: Tensor, counts: Tensor, capacity: int, agreed: int, group: Group) -> tuple[Tensor, Tensor]:
    """By a kernel, or else by splits that the host reads."""
    calls = getattr(group if group is not None else dist.group.WORLD, "rows", None) if x.is_cuda else None
    kernel: Kernel | None = calls.kernel(x, counts, capacity, agreed) if calls is not None else None
    if kernel is not None:
        return kernel(x, counts)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "all_to_all_rows in a CUDA graph needs a group of unisono whose GPUs have kernels (docs/gpu.md)"
        )
    return _by_splits(x, counts, capacity, group)


def _by_splits(x: Tensor, counts: Tensor, capacity: int, group: Group) -> tuple[Tensor, Tensor]:
    """Of torch's operations: the counts are exchanged first, and read by the host."""
    sent: list[int] = counts.tolist()
    if min(sent) < 0:
        raise UsageError(f"counts {sent} on rank {dist.get_rank()}: none may be negative")
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    taken: list[int] = received.tolist()
    rows = x[: sum(sent)].contiguous()
    if len(rows) < sum(sent):
        rows = torch.cat([rows, rows.new_zeros(sum(sent) - len(rows), *x.shape[1:])])
    moved = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(moved, rows, taken, sent, group=group)
    out = x.new_zeros(capacity, *x.shape[1:])
    out[: len(moved)] = moved[:capacity]
    return out, received
