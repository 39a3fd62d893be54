"""Gradient buckets that also tell which parameters any rank used, which torch's DDP learns by a search of the graph.

Gradients of several parameters lie side by side in one flat tensor, so that one collective serves them all:

    bucket 0            bucket 1
    [ head.bias head.weight | 1 1 ]   [ block.weight | 1 ]
      gradients, in the order they      a mark per parameter: was it used on this rank?
      become ready in backward

The marks travel with the gradients and are averaged like them: what is left tells whether any rank used a parameter,
without a collective of its own. A view of the flat tensor has its parameter's order of dims in memory (channels last
stays channels last), so that optimizers find gradients laid out as the weights are.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from unisono.errors import UsageError

__all__ = ["GradientBucket", "check_dense", "plan_buckets", "shaped"]

_WITH_AVG = ("nccl", "unisono")  # backends that have ReduceOp.AVG for every dtype of gradients


def plan_buckets(parameters: Sequence[Tensor], order: Sequence[int], nbytes: int, first_nbytes: int) -> list[list[int]]:
    """Cut `order` (indices into `parameters`) into buckets of one dtype and device, without changing the order.

    A bucket is closed once it holds `nbytes` bytes or more, the very first one at `first_nbytes`: communication can
    begin soon after backward did. The answer depends on shapes and order alone, so it is the same on every rank.
    Raises UsageError for a size that is not positive.
    """
    if min(nbytes, first_nbytes) < 1:
        raise UsageError(f"a bucket of {min(nbytes, first_nbytes)} bytes: expected 1 or more")
    done: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limit = first_nbytes
    for slot in order:
        kind = (parameters[slot].dtype, parameters[slot].device)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(slot)
        if sum(parameters[member].nbytes for member in bucket) >= limit:
            done.append(open_buckets.pop(kind))
            limit = nbytes
    return done + list(open_buckets.values())


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A view of flat (numel,) with the shape of `like` and its order of dims in memory."""
    strides = like.stride()
    dims = sorted(range(like.dim()), key=lambda dim: -strides[dim])  # those that step farthest through memory first
    back = [dims.index(dim) for dim in range(like.dim())]
    return flat.view([like.shape[dim] for dim in dims]).permute(back)


def check_dense(gradient: Tensor) -> None:
    """Raise UsageError for a gradient that has no place in a bucket."""
    if gradient.layout != torch.strided:
        raise UsageError(
            f"a gradient of shape {list(gradient.shape)} has layout {gradient.layout}, expected a dense one: "
            "build the layer with sparse=False"
        )


class GradientBucket:
    """Some parameters' gradients, averaged over the ranks in place; each `grad` becomes a view of the bucket.

    `slots`: indices of its parameters, in the order of their gradients in `flat`; `flat`: (numel + len(slots),).
    """

    def __init__(self, slots: Sequence[int], parameters: Sequence[Parameter], group: dist.ProcessGroup | None) -> None:
        self.slots = tuple(slots)
        self.group = group
        self.parameters = {slot: parameters[slot] for slot in slots}
        sizes = [parameters[slot].numel() for slot in slots]
        sample = parameters[slots[0]]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=sample.dtype, device=sample.device)
        *pieces, self.marks = torch.split(self.flat, [*sizes, len(sizes)])
        self.views = {slot: shaped(piece, parameters[slot]) for slot, piece in zip(slots, pieces, strict=True)}
        self.untouched: list[int] = []
        self._work: Any = None
        self._summed = 1
        """By how many ranks what comes of the collective is to be divided."""

    @torch.no_grad()
    def take(self, slot: int) -> None:
        """Bring what a parameter has accumulated into the bucket: zeros if it has no gradient."""
        parameter, view = self.parameters[slot], self.views[slot]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            check_dense(parameter.grad)
            view.copy_(parameter.grad)
            parameter.grad = view

    def start(self, touched: AbstractSet[int]) -> None:
        """Start averaging; `touched` are the slots that backward reached on this rank since the last average."""
        self.marks.fill_(1)
        self.untouched = [slot for slot in self.slots if slot not in touched]
        for slot in self.untouched:
            self.marks[self.slots.index(slot)] = 0
        averages = dist.get_backend(self.group) in _WITH_AVG
        self._summed = 1 if averages else dist.get_world_size(self.group)
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._work = dist.all_reduce(self.flat, op, self.group, async_op=True)

    def finish(self, present: float) -> None:
        """Wait; the mean is over the `present` share of the ranks. What no rank used keeps the gradient it had."""
        self._work.wait()
        if present * self._summed != 1:
            self.flat.div_(present * self._summed)
        for slot in self.untouched:
            if self.marks[self.slots.index(slot)] != 0:
                self.parameters[slot].grad = self.views[slot]
