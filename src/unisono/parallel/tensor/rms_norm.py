"""Collectives fused with a residual and RMSNorm in one kernel, for decoding: torch has the parts, and launches each.

A row-parallel layer is followed by an all_reduce, the residual's add and a norm; of a few tokens each takes longer to
launch than to run. On GPUs whose group has kernels (docs/gpu.md) one kernel does it all, up to the sizes of its table.
Everywhere else, on CPUs and on other backends, the same functions are made of torch's operations.

| function | forward | gradient of `x` |
| --- | --- | --- |
| `all_reduce_rms_norm` | all_reduce, add, norm | that of the sum, on every rank alike |
| `reduce_scatter_rms_norm` | reduce_scatter, add, norm; all_gather of the norm if asked for | all_gather |
| `rms_norm_all_gather` | norm, all_gather | reduce_scatter, as of `all_gather_to_region` |

The norm is that of `torch.nn.functional.rms_norm` (Zhang and Sennrich 2019): computed in float32 at least, rounded
once.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from unisono.errors import UsageError
from unisono.parallel.shards import Group, Lengths, lengths_of_part, lengths_of_whole, place
from unisono.parallel.tensor.regions import all_gather_to_region, reduce_from_region, reduce_scatter_from_region

__all__ = ["all_reduce_rms_norm", "reduce_scatter_rms_norm", "rms_norm_all_gather"]

Kernel = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, group: Group = None
) -> tuple[Tensor, Tensor]:
    """The norm of `residual` plus the sum of the ranks' `x`, and that sum with the residual: both [..., hidden].

    `x` [..., hidden], this rank's part of the sum; `residual` of its shape, the same on every rank; `weight` [hidden].
    The results are the same on every rank, of the dtypes that torch's operations give. One kernel for bfloat16, float16
    and float32, all three tensors of one dtype, up to 1 MiB of `x` on 4 GPUs, 256 KiB on 8. It can be captured in CUDA
    graphs.

    Raises UsageError if the shapes do not fit.
    """
    _check(x, residual, weight, x.shape)
    kernel = _kernel("all_reduce_rms_norm", x, residual, weight, eps, group)
    if kernel is None:
        carried = residual + reduce_from_region(x, group)
        return F.rms_norm(carried, weight.shape, weight, eps), carried
    return _run(kernel, x, residual, weight, (eps, group, False, False))


def reduce_scatter_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, dim: int = 0, group: Group = None,
    lengths: Lengths = None, all_gather: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `all_reduce_rms_norm` for sequence parallelism: each rank has its part of `dim` of the sum and of the norm.

    `x` [..., hidden], of the whole sequence; `residual` this rank's part of it, of `lengths[rank]` elements in `dim`
    (None: as `split_evenly` cuts it). Gives the norm and the new residual, both of that part; with `all_gather` the
    norm of the whole sequence, for products that differ by rank: its gradients are summed, as by
    `all_gather_to_region`. The gradient of `weight` is that of this rank's part: `sum_gradients` of a module and
    `copy_to_region` of a tensor sum it.

    One kernel for the dtypes of `all_reduce_rms_norm`, up to 16 MiB of `x`, if all parts are equally long and `dim` is
    the first that is longer than 1.

    Raises UsageError if shapes or lengths do not fit, or if `dim` is that of the hidden elements.
    """
    dim = _sequence_dim(x, dim)
    lengths = lengths_of_whole(x, dim, lengths, group)
    part = (*x.shape[:dim], lengths[place(group).rank], *x.shape[dim + 1 :])
    _check(x, residual, weight, part)
    if min(lengths) == max(lengths) and x.shape[:dim].numel() == 1:
        rows, own = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
        name = "reduce_scatter_rms_norm_all_gather" if all_gather else "reduce_scatter_rms_norm"
        if (kernel := _kernel(name, rows, own, weight, eps, group)) is not None:
            norm, carried = _run(kernel, rows, own, weight, (eps, group, True, all_gather))
            return norm.view(x.shape if all_gather else part), carried.view(part)
    carried = residual + reduce_scatter_from_region(x, dim, group, lengths)
    norm = F.rms_norm(carried, weight.shape, weight, eps)
    return all_gather_to_region(norm, dim, group, lengths) if all_gather else norm, carried


def rms_norm_all_gather(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, dim: int = 0, group: Group = None, lengths: Lengths = None
) -> Tensor:
    """The norm of the ranks' parts of `dim`, joined along it: of a residual that no `reduce_scatter_rms_norm` has left.

    `x` [..., hidden], this rank's part; `lengths` of all ranks' parts (None: as long on every rank; no rank is asked).
    Gradients, kernel and errors as of `reduce_scatter_rms_norm`; up to 16 MiB of the result.
    """
    dim, hidden = _sequence_dim(x, dim), x.shape[-1]
    _check(x, None, weight, x.shape)
    lengths = lengths_of_part(x, dim, lengths or (x.shape[dim],) * place(group).world_size, group)
    if min(lengths) == max(lengths) and x.shape[:dim].numel() == 1:
        rows = x.reshape(-1, hidden)
        if (kernel := _kernel("rms_norm_all_gather", rows, None, weight, eps, group)) is not None:
            norm, _ = _run(kernel, rows, None, weight, (eps, group, False, True))
            return norm.view(*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :])
    return all_gather_to_region(F.rms_norm(x, weight.shape, weight, eps), dim, group, lengths)


def _sequence_dim(x: Tensor, dim: int) -> int:
    """The dim, counted from the first."""
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise UsageError(f"dim = {dim} of {list(x.shape)} must be one of the sequence, not that of the hidden elements")
    return dim % x.dim()


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, part: tuple[int, ...]) -> None:
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise UsageError(f"weight must be [hidden], the last dim of x {list(x.shape)}, not {list(weight.shape)}")
    if residual is not None and residual.shape != part:
        raise UsageError(f"residual must be {list(part)} for x {list(x.shape)}, not {list(residual.shape)}")


def _kernel(
    collective: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: Group
) -> Kernel | None:
    """The kernel of a call; None if it is made of torch's operations."""
    norms = getattr(group if group is not None else dist.group.WORLD, "norms", None) if x.is_cuda else None
    found: Kernel | None = norms.kernel(collective, x, residual, weight, eps) if norms is not None else None
    return found


Terms = tuple[float, Group, bool, bool]
"""eps; the group; whether the sum is scattered, whether the norm is gathered."""


def _run(kernel: Kernel, x: Tensor, residual: Tensor | None, weight: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The kernel, in autograd's graph if anything asks for gradients."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight)):
        found: tuple[Tensor, Tensor] = _ByKernel.apply(x, residual, weight, kernel, terms)  # type: ignore[no-untyped-call]
        return found
    return kernel(x, residual, weight)


class _ByKernel(torch.autograd.Function):
    """A kernel; its gradient by torch's operations, which can be differentiated themselves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, kernel: Kernel, terms: Terms
    ) -> tuple[Tensor, Tensor | None]:
        ctx.terms = terms
        norm, carried = kernel(x, residual, weight)
        ctx.save_for_backward(carried, weight)
        return norm, None if residual is None else carried

    @staticmethod
    def backward(ctx: Any, to_norm: Tensor, to_carried: Tensor | None) -> Any:
        (carried, weight), (eps, group, scattered, gathered) = ctx.saved_tensors, ctx.terms
        if gathered:
            to_norm = reduce_scatter_from_region(to_norm, 0, group)
        wide = carried.to(torch.promote_types(carried.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        unit, gain = wide * scale, to_norm * weight.to(wide.dtype)
        to_sum = (scale * (gain - unit * (gain * unit).mean(-1, keepdim=True))).to(carried.dtype)
        to_weight = None
        if ctx.needs_input_grad[2]:
            to_weight = (to_norm * unit).reshape(-1, len(weight)).sum(0).to(weight.dtype)
        if to_carried is None:
            return to_sum, None, to_weight, None, None
        to_sum = to_sum + to_carried
        to_x = to_sum
        if scattered:
            size = place(group).world_size
            to_x = all_gather_to_region(to_sum, 0, group, [len(to_sum)] * size)
        return to_x, to_sum, to_weight, None, None
