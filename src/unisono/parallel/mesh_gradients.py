"""Gradients of a model over a mesh: summed over the ranks that hold the same weights, clipped by the norm of all."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.mesh import TrainingMesh
from unisono.parallel.shards import Sharded, Split

__all__ = ["Piece", "clip_gradients", "gradients_apart", "pieces_of", "sum_gradients_over"]


class Piece(NamedTuple):
    """A parameter as one rank holds it.

    name: in the whole model. split: how it is cut along tp; None: it is not. is_copy: another stage holds it too, and
    counts it.
    """

    name: str
    parameter: nn.Parameter
    split: Split | None
    is_copy: bool = False


def pieces_of(stage: nn.Module, copies: Sequence[str] = ()) -> Iterator[Piece]:
    """The parameters of a stage, whose names are those of the whole model; `copies` are those that another counts."""
    for prefix, module in stage.named_modules():
        splits = module.splits if isinstance(module, Sharded) else {}
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            yield Piece(full_name, parameter, splits.get(name), full_name in copies)


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


@torch.no_grad()
def sum_gradients_over(parameters: Iterable[nn.Parameter], mesh: TrainingMesh, *axes: str) -> None:
    """Sum all gradients over the ranks of some axes in one all_reduce for each axis; None counts as zero. Collective.

    The parameters must be of one dtype on one device. The `.grad` become views of one flat tensor.
    """
    held = list(parameters)
    if not held or not set(axes) & set(mesh.axes):
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in held])
    mesh.sum(flat, *axes)
    for parameter, part in zip(held, torch.split(flat, [p.numel() for p in held]), strict=True):
        parameter.grad = part.view_as(parameter)


@torch.no_grad()
def clip_gradients(pieces: Iterable[Piece], mesh: TrainingMesh, max_norm: float) -> Tensor:
    """Scale gradients so that the Euclidean norm of those of the whole model is at most max_norm. Collective.

    A gradient cut along tp is put together from its parts; one that all tp ranks hold, or several stages, counts once.
    Returns the norm before, a float32 scalar, the same on every rank. Raises UsageError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}, expected a positive number")
    held = [piece for piece in pieces if piece.parameter.grad is not None]
    cut = _squares(piece for piece in held if piece.split is not None and not piece.is_copy)
    whole = _squares(piece for piece in held if piece.split is None and not piece.is_copy)
    norm = mesh.sum(mesh.sum(cut, "tp") + whole, "pp").sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for piece in held:
        piece.parameter.grad.mul_(scale)  # type: ignore[union-attr]
    return norm


def _squares(pieces: Iterable[Piece]) -> Tensor:
    gradients = [piece.parameter.grad for piece in pieces if piece.parameter.grad is not None]
    device = gradients[0].device if gradients else None
    return sum((g.float().pow(2).sum() for g in gradients), start=torch.zeros((), device=device))
