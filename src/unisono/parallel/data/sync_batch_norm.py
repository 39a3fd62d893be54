"""Batch normalisation over the batches of all ranks, on CPU tensors too, which torch's own SyncBatchNorm refuses.

Statistics are those of one process on the whole batch, also where ranks hold unequal numbers of rows, or none. Each
rank finds count, mean and sum of squared deviations of its own rows; these are gathered and merged in rank order by
the parallel formula of Chan, Golub and LeVeque (1983), which loses no digits where the mean is large. One all_gather
forward, one all_reduce backward, each of a few numbers per channel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.errors import UsageError
from unisono.parallel.shards import apply
from unisono.torch_names import all_gather_single

__all__ = ["SyncBatchNorm", "normalise"]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A drop-in for nn.BatchNorm1d, 2d and 3d whose training statistics are over all ranks of `group`.

    Input (rows, channels, ...) of any floating dtype and at least 2 dims, the same channels on all ranks, any number of
    rows. Output of the same shape and dtype. Statistics are kept in float32 at least. All ranks must run forward, and
    backward if the input or the weights take gradients. Gradients of weight and bias are those of this rank's rows, to
    be averaged like any others. In eval mode nothing travels. Raises UsageError for a wrong shape (before anything
    travels) and, on every rank, if all ranks together have one value per channel or none.

    A source is Ioffe & Szegedy 2015; the interface is torch.nn.SyncBatchNorm's.
    """

    def __init__(self, num_features: int, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)
        self.group = group

    @classmethod
    def convert(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every BatchNorm in `module`, and itself if it is one; weights and buffers are the same objects.

        `group`: None is torch's SyncBatchNorm's own where it has one, else all ranks.
        """
        converted = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            own = getattr(module, "process_group", None) if group is None else group
            norm = cls(module.num_features, module.eps, module.momentum, False, module.track_running_stats, group=own)
            norm.affine, norm.training = module.affine, module.training
            norm._parameters, norm._buffers = dict(module._parameters), dict(module._buffers)
            converted = norm
        for name, child in module.named_children():
            setattr(converted, name, cls.convert(child, group))
        return converted

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (rows, channels, ...) over all dims but channels, and over the ranks in training."""
        _check(self, input)
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        return normalise(self, input, self.group)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dims from 2 on."""


def _check(norm: nn.modules.batchnorm._BatchNorm, values: Tensor) -> None:
    channels = norm.num_features
    if values.dim() < 2 or values.shape[1] != channels:
        raise UsageError(
            f"SyncBatchNorm of {channels} channels got {list(values.shape)}, expected [rows, {channels}, ...]"
        )


def normalise(norm: nn.modules.batchnorm._BatchNorm, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``values`` (rows, channels, ...) with the statistics of all ranks of ``group``, which ``norm`` also tracks.

    Raises UsageError for a wrong shape, and if all ranks together have one value per channel or none.
    """
    _check(norm, values)
    wide = torch.promote_types(values.dtype, torch.float32)
    count, mean, variance = _merge(_statistics(values.detach().to(wide)), group)
    if count <= 1:
        raise UsageError(
            f"all ranks together have {count:.0f} values per channel, expected 2 or more: there is nothing to normalise"
        )
    if norm.training and norm.running_mean is not None:
        _track(norm, mean, variance * (count / (count - 1)))
    scale = torch.rsqrt(variance + norm.eps)
    normalised = apply(_Normalise, values, mean, scale, count, group)
    if norm.affine:
        shape = [1, -1] + [1] * (values.dim() - 2)
        normalised = normalised * norm.weight.view(shape) + norm.bias.view(shape)
    return normalised.to(values.dtype)


def _other_dims(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _statistics(values: Tensor) -> Tensor:
    """(3, channels) of one rank: count, mean, sum of squared deviations; zeros where it has no values."""
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    table = values.new_zeros(3, channels)
    if count:
        variance, mean = torch.var_mean(values, _other_dims(values), correction=0)
        table[0], table[1], table[2] = count, mean, variance * count
    return table


@torch.no_grad()
def _merge(mine: Tensor, group: dist.ProcessGroup | None) -> tuple[float, Tensor, Tensor]:
    """Count, mean and biased variance (channels,) over all ranks: the same bits on each."""
    tables = mine.new_empty(dist.get_world_size(group), *mine.shape)
    all_gather_single(tables.view(-1), mine.view(-1), group)
    counts, means, squares = tables.unbind(1)
    count = float(counts[:, 0].double().sum())
    if not count:
        return 0.0, means[0], squares[0]
    mean = (counts * means).sum(0) / count
    deviations = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
    return count, mean, deviations / count


@torch.no_grad()
def _track(norm: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics, as nn.BatchNorm does; variance is the unbiased one."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    step = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), step)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), step)


class _Normalise(torch.autograd.Function):
    """(values - mean) * scale, where mean and scale depend on the values of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, mean: Tensor, scale: Tensor, count: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        shape = [1, -1] + [1] * (values.dim() - 2)
        normalised = (values.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalised, scale)
        ctx.count, ctx.group, ctx.dtype = count, group, values.dtype
        return normalised

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = gradients[0]
        normalised, scale = ctx.saved_tensors
        shape = [1, -1] + [1] * (normalised.dim() - 2)
        dims = _other_dims(normalised)
        sums = torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)])
        dist.all_reduce(sums, group=ctx.group)
        mean, slope = (sums / ctx.count).unbind()
        centred = gradient - mean.view(shape) - normalised * slope.view(shape)
        return (centred * scale.view(shape)).to(ctx.dtype), None, None, None, None
