"""Cross-entropy of plain tensors whose vocabulary is split, unevenly too; torch's loss_parallel takes DTensors alone.

No rank ever holds the whole softmax. Two all_reduces of a few numbers per token instead of an all_gather of the logits:
the maximum, by which they are made safe to exponentiate; then, in one call, the sum of the exponentials and the
target's logit, which one rank has (Shoeybi et al. 2019, Megatron-LM, section 3). The gradient, softmax − one-hot, is
local.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.errors import UsageError
from unisono.parallel.shards import Group, apply, place, split_evenly

__all__ = ["parallel_cross_entropy"]


class _Terms(NamedTuple):
    """The arguments of the loss beside the tensors."""

    vocabulary: int
    first: int
    ignore_index: int
    label_smoothing: float
    group: Group


class _CrossEntropy(torch.autograd.Function):
    """The loss of every row: logits [N, share], target [N] → [N], zero where the target is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, terms: _Terms) -> Tensor:
        ctx.terms = terms
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = wide.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=terms.group)
        shifted = wide - highest.unsqueeze(-1)
        local, mine = _of_this_rank(target, terms.first, logits.shape[-1])
        at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        sums = [at_target, shifted.sum(-1)] if terms.label_smoothing else [at_target]
        exponentials = shifted.exp_()
        terms_of_all = torch.stack([exponentials.sum(-1), *sums])
        dist.all_reduce(terms_of_all, group=terms.group)
        total, at_target = terms_of_all[0], terms_of_all[1]
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), target)
        ctx.dtype = logits.dtype
        loss = total.log() - at_target
        if terms.label_smoothing:
            uniform = total.log() - terms_of_all[2] / terms.vocabulary
            loss = (1 - terms.label_smoothing) * loss + terms.label_smoothing * uniform
        return loss.masked_fill(target == terms.ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        softmax, target = ctx.saved_tensors
        terms: _Terms = ctx.terms
        local, mine = _of_this_rank(target, terms.first, softmax.shape[-1])
        hot = mine.to(softmax.dtype).unsqueeze(-1) * (1 - terms.label_smoothing)
        to_logits = softmax - terms.label_smoothing / terms.vocabulary
        to_logits.scatter_add_(-1, local.unsqueeze(-1), -hot)
        gradient = gradient.masked_fill(target == terms.ignore_index, 0.0)
        return to_logits.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None


def _of_this_rank(target: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Each target as an index into this rank's share (0 where it is another's), and whether it is this rank's."""
    local = target - first
    mine = (local >= 0) & (local < rows)
    return local.masked_fill(~mine, 0), mine


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    *,
    group: Group = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy that `F.cross_entropy` gives for the whole logits; the same value on every rank.

    `logits` [..., share of vocabulary], the shares as `split_evenly` cuts them; `target` [...], integer, the same on
    every rank. Computed in float32 at least and returned in it (float64 for float64). `reduction`: "mean" over the
    targets that are not ignored, "sum", or "none" for the loss of every target, [...], zero where ignored.

    Raises UsageError if the logits are not this rank's share, shapes differ, a target is outside the vocabulary, or
    the reduction or the smoothing is unknown.
    """
    rank, world_size = place(group)
    lengths = split_evenly(vocabulary, world_size, "the vocabulary")
    _check(logits, target, lengths[rank], vocabulary, ignore_index)
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f'reduction = {reduction!r}: must be "mean", "sum" or "none"')
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing = {label_smoothing}: must be between 0 and 1")
    terms = _Terms(vocabulary, sum(lengths[:rank]), ignore_index, label_smoothing, group)
    loss = apply(_CrossEntropy, logits.flatten(0, -2), target.flatten(), terms)
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (target != ignore_index).sum()


def _check(logits: Tensor, target: Tensor, share: int, vocabulary: int, ignore_index: int) -> None:
    if logits.dim() < 2 or logits.shape[-1] != share:
        raise UsageError(f"logits {list(logits.shape)} must be [..., {share}], this rank's share of {vocabulary}")
    if target.shape != logits.shape[:-1]:
        raise UsageError(
            f"target must be {list(logits.shape[:-1])}, one per row of the logits, not {list(target.shape)}"
        )
    if target.is_floating_point():
        raise UsageError(f"target must be integers, not {target.dtype}")
    outside = ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
    if outside.any():
        where = outside.nonzero()[0].tolist()
        raise UsageError(
            f"target {int(target[tuple(where)])} at {where} is outside the vocabulary of {vocabulary}: targets are "
            f"0 … {vocabulary - 1}, or ignore_index = {ignore_index}"
        )
