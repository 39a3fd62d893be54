"""Six functions into and out of the region where ranks hold different parts; torch's differentiable ones always sum.

| function | forward | backward | the gradient that comes in is |
| --- | --- | --- | --- |
| `copy_to_region` | nothing | all_reduce | this rank's part of the sum |
| `reduce_from_region` | all_reduce | nothing | the same on every rank |
| `scatter_to_region` | own part of a dim | all_gather | that of the own part |
| `gather_from_region` | all_gather along a dim | own part | the same on every rank |
| `all_gather_to_region` | all_gather along a dim | reduce_scatter | this rank's part of the sum |
| `reduce_scatter_from_region` | reduce_scatter along a dim | all_gather | that of the own part |

Each is the other's gradient in pairs, so they can be differentiated any number of times. The first four are the
operators f and g of Shoeybi et al. 2019 (Megatron-LM), the last two those of Korthikanti et al. 2022 (sequence
parallelism). Tensors of any float dtype and shape; all work on any backend of torch.distributed.

`lengths` says how many elements of the dim each rank holds. None means: where the whole is at hand, split as
`split_evenly` does; where only the own part is, ask the ranks (one small all_gather).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.shards import Group, Lengths, apply, lengths_of_part, lengths_of_whole, own_part, place
from unisono.torch_names import all_gather_single, reduce_scatter_single

__all__ = [
    "all_gather_to_region",
    "copy_to_region",
    "gather_from_region",
    "reduce_from_region",
    "reduce_scatter_from_region",
    "scatter_to_region",
    "start_all_gather",
    "start_reduce_scatter",
    "sum_gradients",
]

Pending = Callable[[], Tensor]


def start_all_gather(part: Tensor, lengths: Sequence[int], group: Group) -> Pending:
    """Begin to join the ranks' parts along dim 0; the function returned waits and gives the whole.

    Parts of different lengths travel padded to the longest, since not every backend gathers uneven tensors.
    """
    longest = max(lengths)
    padded = part.new_zeros(longest, *part.shape[1:]) if part.shape[0] < longest else part.contiguous()
    if padded.shape != part.shape:
        padded[: part.shape[0]] = part
    whole = part.new_empty(longest * len(lengths), *part.shape[1:])
    work = all_gather_single(whole, padded, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        if min(lengths) == longest:
            return whole
        return torch.cat([whole[r * longest : r * longest + length] for r, length in enumerate(lengths)])

    return finish


def start_reduce_scatter(whole: Tensor, lengths: Sequence[int], group: Group) -> Pending:
    """Begin to sum the ranks' wholes and split the sum along dim 0; the function returned waits and gives the part."""
    longest, rank = max(lengths), place(group).rank
    padded = whole.contiguous()
    if min(lengths) < longest:
        padded = whole.new_zeros(len(lengths), longest, *whole.shape[1:])
        for peer, length in enumerate(lengths):
            padded[peer, :length] = own_part(whole, 0, lengths, peer)
        padded = padded.flatten(0, 1)
    part = whole.new_empty(longest, *whole.shape[1:])
    work = reduce_scatter_single(part, padded, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return part[: lengths[rank]]

    return finish


def _sum(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _along(dim: int, tensor: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """Does along `dim` what `work` does along dim 0."""
    return work(tensor.movedim(dim, 0)).movedim(0, dim)


def _scatter(tensor: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    return own_part(tensor, dim, lengths, place(group).rank).contiguous()


def _gather(tensor: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    return _along(dim, tensor, lambda part: start_all_gather(part, lengths, group)())


def _reduce_scatter(tensor: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    return _along(dim, tensor, lambda whole: start_reduce_scatter(whole, lengths, group)())


_WAYS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (lambda tensor, group: tensor.view_as(tensor), "reduce"),
    "reduce": (_sum, "copy"),
    "scatter": (_scatter, "gather"),
    "gather": (_gather, "scatter"),
    "all_gather": (_gather, "reduce_scatter"),
    "reduce_scatter": (_reduce_scatter, "all_gather"),
}
"""What each does forward, and the one that its gradient takes."""


class _Region(torch.autograd.Function):
    """One of `_WAYS`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, way: str, *args: Any) -> Tensor:
        forward, ctx.back = _WAYS[way]
        ctx.args = args
        return forward(tensor, *args)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply(_Region, gradient, ctx.back, *ctx.args), None, *(None for _ in ctx.args)


def copy_to_region(tensor: Tensor, group: Group = None) -> Tensor:
    """The same tensor, on every rank alike; its gradient is the sum of the ranks' gradients."""
    return apply(_Region, tensor, "copy", group)


def reduce_from_region(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum of the ranks' tensors, on every rank; the gradient passes as it is."""
    return apply(_Region, tensor, "reduce", group)


def scatter_to_region(tensor: Tensor, dim: int, group: Group = None, lengths: Lengths = None) -> Tensor:
    """This rank's part of `dim` of a tensor that every rank holds; the gradient is gathered from all.

    Raises UsageError if lengths do not fit the tensor or the group.
    """
    return apply(_Region, tensor, "scatter", dim, lengths_of_whole(tensor, dim, lengths, group), group)


def gather_from_region(tensor: Tensor, dim: int, group: Group = None, lengths: Lengths = None) -> Tensor:
    """The ranks' parts joined along `dim`, for a computation that every rank does alike: the gradient is not summed.

    Raises UsageError if lengths do not fit the tensor or the group, or if the parts differ in another dim.
    """
    return apply(_Region, tensor, "gather", dim, lengths_of_part(tensor, dim, lengths, group), group)


def all_gather_to_region(tensor: Tensor, dim: int, group: Group = None, lengths: Lengths = None) -> Tensor:
    """The ranks' parts joined along `dim`, for computations that differ by rank: their gradients are summed.

    Raises UsageError if lengths do not fit the tensor or the group, or if the parts differ in another dim.
    """
    return apply(_Region, tensor, "all_gather", dim, lengths_of_part(tensor, dim, lengths, group), group)


def reduce_scatter_from_region(tensor: Tensor, dim: int, group: Group = None, lengths: Lengths = None) -> Tensor:
    """This rank's part of `dim` of the sum of the ranks' tensors; the gradient is gathered from all.

    Raises UsageError if lengths do not fit the tensor or the group.
    """
    return apply(_Region, tensor, "reduce_scatter", dim, lengths_of_whole(tensor, dim, lengths, group), group)


def sum_gradients(module: torch.nn.Module, group: Group = None) -> torch.nn.Module:
    """Make a module's parameters count what every rank does with them: each gradient is summed over the group.

    For a layer that all ranks hold whole and apply to different parts of the sequence (a norm between sequence-parallel
    layers). Returns the module. The gradient is summed as backward reaches it, in the same order on every rank.
    """
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: _sum(gradient, group))  # type: ignore[no-untyped-call]
    return module
