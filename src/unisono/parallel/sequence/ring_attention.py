"""Ring attention for any length on any device; torch's context_parallel has it for CUDA's kernels and even lengths.

Each rank keeps its queries; blocks of keys and values go round the ring, and each rank merges what its queries get
from every block (Liu et al. 2023, Ring Attention with Blockwise Transformers). The next block is on its way while the
present one is computed. In backward the blocks go round again, and the sums of their gradients follow them home.

Per rank and layer n − 1 blocks of keys and values are sent forward; backward, those and n blocks of gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.errors import UsageError
from unisono.parallel.sequence.block_attention import Partial, accumulation_dtype, attend, attend_backward
from unisono.parallel.sequence.layout import Layout, Seen
from unisono.parallel.sequence.rings import Groups, Homeward, Rings
from unisono.parallel.shards import Lengths, apply

__all__ = ["ring_attention"]


@dataclass(frozen=True)
class _Plan:
    """The arguments that the ranks agreed on."""

    rings: Rings
    lengths: tuple[int, ...]
    layout: Layout | None  # None: every query sees every key
    scale: float

    def seen(self, source: int) -> Seen | None:
        """The part of a block that this rank's queries see; None: nothing."""
        if 0 in (self.lengths[self.rings.rank], self.lengths[source]):
            return None
        return (
            Seen(slice(None), slice(None), False) if self.layout is None else self.layout.seen(self.rings.rank, source)
        )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        result = Partial.nothing(query)
        for source, block in plan.rings.circulate(torch.stack((key, value)), plan.lengths):
            seen = plan.seen(source)
            if seen is not None:
                keys, values = block[..., seen.keys, :]
                part = attend(query[..., seen.queries, :], keys, values, plan.scale, seen.causal)
                result.rows(seen.queries).merge_(part)
        out = result.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, result.lse)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradient = gradient.to(accumulation_dtype(query))
        delta = (gradient * out).sum(-1)
        to_query = torch.zeros_like(gradient)
        homeward = Homeward(plan.rings, plan.lengths)
        for source, block in plan.rings.circulate(torch.stack((key, value)), plan.lengths):
            to_block = torch.zeros_like(block, dtype=gradient.dtype)
            seen = plan.seen(source)
            if seen is not None:
                rows, keys = seen.queries, seen.keys
                inputs = (query[..., rows, :], *block[..., keys, :])
                outer = (gradient[..., rows, :], delta[..., rows], lse[..., rows])
                to_rows, to_keys, to_values = attend_backward(*outer, inputs, plan.scale, seen.causal)
                to_query[..., rows, :] += to_rows
                to_block[..., keys, :] = torch.stack((to_keys, to_values))
            homeward.add(to_block)
        to_key, to_value = homeward.arrived()
        return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Groups = None,
    causal: bool = False,
    layout: str = "zigzag",
    scale: float | None = None,
    lengths: Lengths = None,
) -> Tensor:
    """Scaled dot-product attention over the whole sequence, of which each rank of the group holds a part.

    All three are this rank's part, [..., own length, width] of one shape and float dtype; so is the result. Computed in
    float32 at least. `scale` is 1/√width by default.

    `group` may be a pair (inner, outer) of groups, as the axes of a mesh: a ring of rings, see
    `unisono.parallel.sequence.rings`. With `causal` each position sees those up to its own; `layout` says which
    positions the ranks hold: "zigzag" as `shard_sequence` cuts them, in balance, or "contiguous", in rank order and of
    any lengths.

    `lengths` are the ranks' own lengths; None asks them (a small all_gather per group) and compares everything else.
    Raises UsageError, on every rank, if shapes, dtypes or layout do not fit together.
    """
    rings = Rings(group)
    if lengths is None:
        lengths = _ask(query, key, value, rings)
    if len(lengths) != rings.world_size or lengths[rings.rank] != query.shape[-2]:
        raise UsageError(f"rank {rings.rank} of {rings.world_size} has {query.shape[-2]} positions, which is not what "
                         f"lengths = {list(lengths)} say")  # fmt: skip
    order = Layout(layout, sum(lengths), rings.world_size)
    if causal and layout == "zigzag" and tuple(lengths) != order.lengths:
        raise UsageError(
            f"the ranks hold {list(lengths)} positions, but zigzag is {list(order.lengths)}: use shard_sequence"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return apply(_RingAttention, query, key, value, _Plan(rings, tuple(lengths), order if causal else None, scale))


def _ask(query: Tensor, key: Tensor, value: Tensor, rings: Rings) -> list[int]:
    """Every rank's length, once all that must be alike is found to be."""
    alike = query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype and query.dim() >= 2
    alike = alike and query.is_floating_point()
    precision = round(1 / torch.finfo(query.dtype).eps) if alike else 0  # tells the float dtypes apart
    mine = [query.dim(), *query.shape, precision]
    table = rings.ask([alike, *(mine + [0] * 8)[:8]], query.device)
    wrong = [rank for rank, (fits, *_) in enumerate(table) if not fits]
    if wrong:
        raise UsageError(
            "query, key and value must be of one shape [..., length, width] and float dtype, but they are not on "
            f"ranks {wrong}; on rank {rings.rank} they are "
            f"{list(query.shape)} {query.dtype}, {list(key.shape)} {key.dtype}, {list(value.shape)} {value.dtype}"
        )
    place = query.dim() - 1  # of the length among what was sent, after the number of dims
    others = {tuple(row[1 : 1 + place] + row[2 + place :]) for row in table}
    if len(others) > 1:
        shapes = ", ".join(f"rank {rank}: {row[2 : 2 + row[1]]}" for rank, row in enumerate(table))
        raise UsageError(f"the ranks' parts may differ in length only, but here are {shapes}, or their dtypes differ")
    return [row[1 + place] for row in table]
