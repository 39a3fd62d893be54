"""Clipping by the norm of a whole model whose parts are plain tensors; torch's takes one rank's, or DTensors."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import UsageError

__all__ = ["clip_grad_norm_", "scale_to_norm_", "squared_norm"]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale all gradients so that their Euclidean norm, taken as one vector, is at most `max_norm`, in place.

    Each rank's parameters are its own part of the whole: the stages of a pipeline, say. One float32 is summed over the
    group (None: all ranks). Where every rank holds the same gradients, `torch.nn.utils.clip_grad_norm_` does it.

    Returns the norm before clipping, float32 (), equal on all ranks. Raises UsageError if max_norm is not positive.
    Pascanu et al. 2013, On the difficulty of training recurrent neural networks.
    """
    held = list(parameters)
    total = squared_norm(held)
    dist.all_reduce(total, group=group)
    return scale_to_norm_(held, total.sqrt(), max_norm)


def squared_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of this rank's gradients: float32 (), on the device of the first parameter."""
    held = list(parameters)
    total = torch.zeros((), device=held[0].device if held else "cpu")
    for parameter in held:
        if parameter.grad is not None:
            total += parameter.grad.float().pow(2).sum().to(total.device)
    return total


def scale_to_norm_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scale gradients whose norm is `norm` to at most `max_norm`, in place; returns `norm`.

    Raises UsageError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}, expected a positive number")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return norm
