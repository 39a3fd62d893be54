"""Ways to sum over the ranks, each followed by torch's add and norm."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from decoding.llama import AddAndNorm

__all__ = ["apart", "summed", "symmetric"]

Reduce = Callable[[Tensor], Tensor]


def apart(reduce: Reduce) -> AddAndNorm:
    """A sum over the ranks, then torch's add and norm."""

    def add_and_norm(x: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + reduce(x)
        return F.rms_norm(total, gain.shape, gain, 1e-6), total

    return add_and_norm


def summed(group: dist.ProcessGroup | None) -> AddAndNorm:
    """By all_reduce in a group."""

    def reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    return apart(reduce)


def symmetric(group: dist.ProcessGroup, width: int) -> AddAndNorm:
    """By torch's operation on symmetric memory, into which it copies its input; ``group``: of NCCL."""
    import torch.distributed._symmetric_memory as symm_mem

    device = torch.device("cuda", torch.cuda.current_device())
    memory = symm_mem.empty(1, width, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(memory, group.group_name)
    return apart(lambda x: torch.ops.symm_mem.one_shot_all_reduce_copy(memory, x, "sum", group.group_name))
