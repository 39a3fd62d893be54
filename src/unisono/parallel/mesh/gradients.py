"""Gradients over a mesh of plain tensors: sums along axes, clipping by the whole model's norm; torch has DTensor's.

A model in DTensors needs none of this, but DTensor does not cut a fused query, key and value, and cuts uneven layers in
another way.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unisono.parallel.pipeline.clip import scale_to_norm_, squared_norm
from unisono.parallel.shards import Sharded, Split

__all__ = ["ParameterPart", "clip_gradients", "gradients_apart", "parts_of", "sum_gradients_over", "sum_over"]


class ParameterPart(NamedTuple):
    """A parameter as one rank holds it.

    name: in the whole model. split: how it is cut along tp; None: it is not. is_copy: another stage holds it too, and
    counts it.
    """

    name: str
    parameter: nn.Parameter
    split: Split | None
    is_copy: bool = False


def parts_of(stage: nn.Module, copies: Sequence[str] = ()) -> Iterator[ParameterPart]:
    """The parameters of a stage, whose names are those of the whole model; `copies` are those that another counts."""
    for prefix, module in stage.named_modules():
        splits = module.splits if isinstance(module, Sharded) else {}
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            yield ParameterPart(full_name, parameter, splits.get(name), full_name in copies)


@contextmanager
def gradients_apart(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep the gradients that are there out of what the block does with its own; at its end the two are added."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, earlier in zip(parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def sum_over(tensor: Tensor, mesh: DeviceMesh, *axes: str) -> Tensor:
    """Sum a tensor in place over the ranks of some axes, one after the other; returns it. Collective."""
    for axis in axes:
        group = mesh.get_group(axis)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


@torch.no_grad()
def sum_gradients_over(parameters: Iterable[nn.Parameter], mesh: DeviceMesh, *axes: str) -> None:
    """Sum all gradients over the ranks of some axes in one all_reduce for each axis; None counts as zero. Collective.

    The parameters must be of one dtype on one device. The `.grad` become views of one flat tensor.
    """
    held = list(parameters)
    if not held or all(dist.get_world_size(mesh.get_group(axis)) == 1 for axis in axes):
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in held])
    sum_over(flat, mesh, *axes)
    for parameter, part in zip(held, torch.split(flat, [p.numel() for p in held]), strict=True):
        parameter.grad = part.view_as(parameter)


@torch.no_grad()
def clip_gradients(parts: Sequence[ParameterPart], mesh: DeviceMesh, max_norm: float) -> Tensor:
    """Scale gradients so that the Euclidean norm of those of the whole model is at most max_norm. Collective.

    A gradient cut along tp is put together from its parts; one that all tp ranks hold, or several stages, counts once.
    Returns the norm before, a float32 scalar, the same on every rank. Raises UsageError if max_norm is not positive.
    """
    counted = [part for part in parts if not part.is_copy]
    cut = squared_norm(part.parameter for part in counted if part.split is not None)
    whole = squared_norm(part.parameter for part in counted if part.split is None)
    norm = sum_over(sum_over(cut, mesh, "tp") + whole, mesh, "pp").sqrt()
    return scale_to_norm_([part.parameter for part in parts], norm, max_norm)
