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

from unisono.errors import UnisonoError, UsageError

__all__ = ["Average", "GradientBucket", "check_dense", "plan_buckets", "shaped"]

_WITHOUT_AVG: set[tuple[str, str, torch.dtype]] = set()  # backend, device, dtype: what has refused ReduceOp.AVG


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


class Average:
    """An asynchronous mean of flat (numel,) over the ranks of `group`, in place.

    With ReduceOp.AVG where the backend has it for this device and dtype, else SUM and a division. A backend without AVG
    says so before anything moves, some at once and some in `wait`; no rank asks with a collective of its own, so ranks
    that know already and ranks that do not agree.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup | None) -> None:
        self.flat, self.group = flat, group
        self._kind = (dist.get_backend(group), flat.device.type, flat.dtype)
        if self._kind not in _WITHOUT_AVG:
            try:
                self._start(dist.ReduceOp.AVG)
            except (RuntimeError, ValueError) as error:
                self._learn(error)
        if self._kind in _WITHOUT_AVG:
            self._start(dist.ReduceOp.SUM)

    def wait(self, present: float = 1.0) -> None:
        """Wait for the mean. `present`: the share of the ranks that contribute, those alone count."""
        try:
            self._work.wait()
        except (RuntimeError, ValueError) as error:
            self._learn(error)
            self._start(dist.ReduceOp.SUM)
            self._work.wait()
        divisor = present * (1 if self._op == dist.ReduceOp.AVG else dist.get_world_size(self.group))
        if divisor != 1:
            self.flat.div_(divisor)

    def _start(self, op: Any) -> None:
        self._op = op
        self._work: Any = dist.all_reduce(self.flat, op, self.group, async_op=True)

    def _learn(self, error: Exception) -> None:
        """Remember a refusal of AVG; raise any other error again."""
        if self._op == dist.ReduceOp.SUM or isinstance(error, UnisonoError) or "AVG" not in str(error):
            raise error
        _WITHOUT_AVG.add(self._kind)


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
        self.average: Average | None = None

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
        self.average = Average(self.flat, self.group)

    def finish(self, present: float) -> None:
        """Wait; the mean is over the `present` share of the ranks. What no rank used keeps the gradient it had."""
        assert self.average is not None
        self.average.wait(present)
        self.average = None
        for slot in self.untouched:
            if self.marks[self.slots.index(slot)] != 0:
                self.parameters[slot].grad = self.views[slot]
