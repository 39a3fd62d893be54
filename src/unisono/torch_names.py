"""torch.distributed's single-tensor collectives under the names of torch 2.13; the older names warn there."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_single", "reduce_scatter_single"]

_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """The ranks' tensors side by side in `output_tensor`; a Work if `async_op`."""
    return getattr(dist, _GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """This rank's part of the sum of the ranks' tensors in `output`; a Work if `async_op`."""
    return getattr(dist, _SCATTER)(output, input, op, group=group, async_op=async_op)
