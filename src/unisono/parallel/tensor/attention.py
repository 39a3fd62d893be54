"""Self-attention split by heads with a fused query, key and value, which torch's ColwiseParallel cannot cut.

Each rank attends with its own heads over the whole sequence. Query, key and value come from one column-parallel matrix,
whose three parts are each cut at heads; the output matrix is row-parallel, so one all_reduce puts the heads together
(Shoeybi et al. 2019, Megatron-LM, section 3).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.shards import Group, Lengths, place
from unisono.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ParallelAttention"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ParallelAttention(nn.Module):
    """Multi-head self-attention, [batch, time, width] → [batch, time, width].

    Made of two whole layers, whose weights are cut: `query_key_value`, width → 3 · width, the three side by side, each
    of them head by head; `out`, width → width. `heads` must be a multiple of the number of ranks.

    `rotate` is applied to this rank's queries and to its keys, [batch, heads of this rank, time, head width] (rotary
    positions). `attend` maps the three of that shape to their result: by default scaled dot-product attention, causal
    or not; pass `unisono.parallel.sequence.ring_attention` bound to another group to split the sequence too. With
    `sequence_dim=1` input and output are this rank's part of the time, while attention sees it all. `chunks` as in
    `unisono.parallel.tensor.overlap`.

    Raises UsageError, on every rank, if the heads do not divide by the ranks or the layers do not fit.
    """

    def __init__(
        self,
        query_key_value: nn.Linear,
        out: nn.Linear,
        heads: int,
        *,
        group: Group = None,
        causal: bool = False,
        rotate: Callable[[Tensor], Tensor] | None = None,
        attend: Attend | None = None,
        sequence_dim: int | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        world_size = place(group).world_size
        _check(query_key_value, out, heads, world_size)
        self.heads, self.rotate = heads // world_size, rotate
        self.attend = attend or partial(F.scaled_dot_product_attention, is_causal=causal)
        options: dict[str, Any] = {"group": group, "sequence_dim": sequence_dim, "chunks": chunks}
        self.query_key_value = ColumnParallelLinear.from_linear(query_key_value, parts=3, **options)
        self.out = RowParallelLinear.from_linear(out, **options)

    def forward(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Apply it; `lengths` are the ranks' parts of `sequence_dim` (None asks the ranks: one small all_gather)."""
        query, key, value = self.query_key_value(x, lengths).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotate is not None:
            query, key = self.rotate(query), self.rotate(key)
        y: Tensor = self.out(self.attend(query, key, value).transpose(1, 2).flatten(2), lengths)
        return y


def _check(query_key_value: nn.Linear, out: nn.Linear, heads: int, world_size: int) -> None:
    if heads < 1 or heads % world_size:
        raise UsageError(
            f"{heads} attention heads cannot be split over {world_size} ranks: "
            "the number of heads must be a multiple of the number of ranks"
        )
    width = out.in_features
    if query_key_value.out_features != 3 * width or width % heads:
        raise UsageError(
            f"{heads} heads of one width need query_key_value with 3 · width outputs and out with width inputs, "
            f"not {query_key_value.out_features} and {width}"
        )
