"""Clipping by the global norm, also where each rank holds a part of the gradients."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import UsageError

__all__ = ["clip_grad_norm"]


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale all gradients so that their Euclidean norm, taken as one vector, is at most `max_norm`.

    Without `group` every rank holds the same gradients (after DataParallel) and nothing travels. With it, each rank's
    gradients are its own part of the whole (shards of a parameter, stages of a pipeline), and one float32 is summed
    over the group.

    Returns the norm before clipping, float32 (), equal on all ranks. Raises UsageError if max_norm is not positive.
    Pascanu et al. 2013, On the difficulty of training recurrent neural networks.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}, expected a positive number")
    held = list(parameters)
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    device = held[0].device if held else torch.device("cpu")
    squares = [gradient.float().pow(2).sum().to(device) for gradient in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
    return norm
