"""Scales of quantised tensors: each sender's largest numbers, and the scales when all of them are known.

The largest of parts are the parts of the largest: so the scales have the same bits however the tensor is sharded.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from unisono.weights.fit import Fit
from unisono.weights.layout import Layout
from unisono.weights.packing import Move, computed, view_of
from unisono.weights.regions import cut, seen

__all__ = ["local_maxima", "scales_of"]


def local_maxima(fit: Fit, sender: Layout, rank: int, tensors: Mapping[str, Tensor]) -> Tensor:
    """max|x| of what this sender holds, for every scale of the fit in order: float32, one number per scale.

    All senders' together are their maximum, elementwise: one all_reduce(MAX) of this tensor.
    """
    found = [torch.zeros(scale.length) for scale in fit.scales.values()]
    for largest, scale in zip(found, fit.scales.values(), strict=True):
        for region in scale.value.regions:
            for box in sender[region.source].parts[rank]:
                bounds = seen(region, box.offsets, box.shape)
                part = None if bounds is None else cut(region, bounds[0], _lengths(*bounds))
                if part is None:
                    continue
                at = tuple(a + b - c for a, b, c in zip(part.at, box.at, box.offsets, strict=True))
                dtype = sender[region.source].dtype
                move = Move(0, part.shape, dtype, region.source, at, part.dims, part.ops)
                block = computed(move, view_of(move, tensors[region.source]), {}).to(torch.float32).abs()
                _keep_largest(largest, block, scale.axis, part.offsets)
    return torch.cat(found) if found else torch.zeros(0)


def _lengths(low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(low, high, strict=True))


def _keep_largest(largest: Tensor, block: Tensor, axis: int | None, offsets: tuple[int, ...]) -> None:
    start, lines = (0, block.reshape(1, -1)) if axis is None else (offsets[axis], block.movedim(axis, 0).flatten(1))
    if block.dim() == 1 and axis is not None:
        lines = block.reshape(-1, 1)
    mine = largest[start : start + len(lines)]
    torch.maximum(mine, lines.amax(1), out=mine)


def scales_of(fit: Fit, maxima: Tensor) -> dict[str, Tensor]:
    """The scales by the names that packing asks for, float32: maxima / qmax, 1 where that is 0."""
    found, at = {}, 0
    for key, scale in fit.scales.items():
        number = maxima[at : at + scale.length] / scale.qmax
        at += scale.length
        found[key] = torch.where(number == 0, 1.0, number).reshape(scale.shape)
        assert prod(scale.shape) == scale.length
    return found
