"""Regions: where each block of a tensor comes from, and what is done to its elements on the way.

A rule never touches data. It turns the table of names into another: a `Value` is a tensor that rules have made, as
regions that tile it; a region is a block of one of the sender's tensors, permuted, with operations on its elements.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = [
    "Bounds",
    "Cast",
    "Op",
    "Quantize",
    "Region",
    "Scale",
    "Value",
    "clipped",
    "cut",
    "permuted",
    "seen",
    "shifted",
]

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape]


class Cast(NamedTuple):
    """`.to(dtype)`; None: to the receiver's, which is known only when both sides are."""

    dtype: torch.dtype | None


class Quantize(NamedTuple):
    """x / scale, rounded to dtype. `scale` names the scales; along `axis` the block begins with the `start`-th.

    With axis None one scale serves for all.
    """

    dtype: torch.dtype
    scale: str
    axis: int | None
    start: int


Op = Cast | Quantize


class Region(NamedTuple):
    """A block of a tensor: offsets and shape there; the sender's tensor and the offsets in its whole.

    dims: dim i of the block is dim dims[i] of the sender's tensor.
    """

    offsets: Shape
    shape: Shape
    source: str
    at: Shape
    dims: Shape
    ops: tuple[Op, ...] = ()

    @property
    def extent(self) -> Shape:
        """The shape of the block in the sender's tensor, whose dims it has."""
        extent = [0] * len(self.dims)
        for i, dim in enumerate(self.dims):
            extent[dim] = self.shape[i]
        return tuple(extent)


class Value(NamedTuple):
    """A tensor that rules have made. With `optional` the receiver need not have it."""

    shape: Shape
    dtype: torch.dtype
    regions: tuple[Region, ...]
    optional: bool = False


class Scale(NamedTuple):
    """The scales of a quantised tensor: `value` is that tensor before, qmax the largest number that dtype holds.

    Of shape 1 in every dim but `axis`; without dims for axis None.
    """

    value: Value
    axis: int | None
    qmax: float

    @property
    def length(self) -> int:
        """Number of scales."""
        return 1 if self.axis is None else self.value.shape[self.axis]

    @property
    def shape(self) -> Shape:
        """The shape of the tensor of scales."""
        if self.axis is None:
            return ()
        return tuple(length if i == self.axis else 1 for i, length in enumerate(self.value.shape))


def cut(region: Region, offsets: Shape, shape: Shape) -> Region | None:
    """The part of a region within a box; None if there is none."""
    bounds = clipped(region, offsets, shape)
    if bounds is None:
        return None
    low, high = bounds
    if low == region.offsets and all(b - a == n for a, b, n in zip(low, high, region.shape, strict=True)):
        return region
    at = list(region.at)
    for i, dim in enumerate(region.dims):
        at[dim] += low[i] - region.offsets[i]
    ops = tuple(
        op._replace(start=op.start + low[op.axis] - region.offsets[op.axis])
        if isinstance(op, Quantize) and op.axis is not None
        else op
        for op in region.ops
    )
    return Region(low, tuple(b - a for a, b in zip(low, high, strict=True)), region.source, tuple(at), region.dims, ops)


def clipped(region: Region, offsets: Shape, shape: Shape) -> Bounds | None:
    """Where a box of the tensor meets a region: first offsets and last, None if nowhere."""
    low = tuple(map(max, region.offsets, offsets))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(region.offsets, region.shape, offsets, shape, strict=True))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def seen(region: Region, offsets: Shape, shape: Shape) -> Bounds | None:
    """Where a box of the sender's tensor lies within a region, in the region's dims; None if nowhere."""
    there = [region.offsets[i] + offsets[dim] - region.at[dim] for i, dim in enumerate(region.dims)]
    return clipped(region, tuple(there), tuple(shape[dim] for dim in region.dims))


def shifted(region: Region, dim: int, by: int) -> Region:
    """A region elsewhere along a dim of its tensor."""
    return region._replace(offsets=(*region.offsets[:dim], region.offsets[dim] + by, *region.offsets[dim + 1 :]))


def permuted(region: Region, dims: Sequence[int]) -> Region:
    """A region of the tensor whose dim i is dim dims[i] of its own."""

    def turned(numbers: Shape) -> Shape:
        return tuple(numbers[dim] for dim in dims)

    ops = tuple(
        op._replace(axis=list(dims).index(op.axis)) if isinstance(op, Quantize) and op.axis is not None else op
        for op in region.ops
    )
    return Region(turned(region.offsets), turned(region.shape), region.source, region.at, turned(region.dims), ops)
