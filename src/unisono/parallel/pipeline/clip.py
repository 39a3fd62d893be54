"""Clipping by the norm of a whole model whose parts are plain tensors; torch's takes one rank's, or DTensors."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

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
    norm = get_total_norm([parameter.grad.float() for parameter in held if parameter.grad is not None])
    return norm.pow(2).to(held[0].device if held else "cpu")


def scale_to_norm_(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scale gradients whose norm is `norm` to at most `max_norm`, in place; returns `norm`.

    Raises UsageError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}, expected a positive number")
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
