"""Linear layers split by column and by row, fused ones too, and overlapped in chunks; torch's styles have neither.

By column each rank has some outputs, by row some inputs. One after the other they need a single all_reduce: what the
first leaves split by feature is what the second takes (Shoeybi et al. 2019, Megatron-LM, section 3). Torch's weight is
[out, in], so a split by column cuts its dim 0.

With `sequence_dim` the activations outside the pair are split along the sequence as well: the column layer gathers
them, the row layer scatters its sum (Korthikanti et al. 2022, section 4.2.2), for the same bytes.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.shards import Group, Lengths, Sharded, Split, lengths_of_part, lengths_of_whole, split_evenly
from unisono.parallel.tensor.overlap import column_linear, gather_column_linear, row_linear, row_scatter_linear
from unisono.parallel.tensor.regions import copy_to_region, gather_from_region, scatter_to_region

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(Sharded):
    """The base of both linear layers."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, group: Group, sequence_dim: int | None, chunks: int
    ) -> None:
        super().__init__(group)
        if chunks < 1:
            raise UsageError(f"chunks = {chunks}: must be 1 (no overlap in pieces) or more")
        if sequence_dim == -1:
            raise UsageError("sequence_dim = -1 is the dim of the features: name the one of the sequence")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_dim, self.chunks = sequence_dim, chunks

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """The layer with this rank's share of a whole linear layer's weights, copied; options as of the constructor."""
        options |= {"bias": linear.bias is not None, "device": "meta", "dtype": linear.weight.dtype}
        return cls(linear.in_features, linear.out_features, **options).adopt(linear)


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer each rank of which computes its share of the outputs.

    Input [..., in_features], the same on every rank, or with `sequence_dim` this rank's part of that dim. Output
    [..., share of out_features], or all of them with `gather_output`. `out_features` need not be a multiple of the
    number of ranks. `parts`: so many matrices side by side in the output (query, key and value), each split for itself.
    `chunks`: pieces in which communication overlaps with the products, see `unisono.parallel.tensor.overlap`.

    The weights are drawn whole from torch's default generator and cut, so with the same seed on every rank they are
    those of `nn.Linear`. Raises UsageError if there are fewer outputs than ranks, or if `parts` does not divide them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        parts: int = 1,
        chunks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence_dim, chunks)
        if parts < 1 or out_features % parts:
            raise UsageError(f"out_features = {out_features} is not {parts} equal parts")
        if gather_output and parts > 1:
            raise UsageError(f"gather_output joins one matrix's outputs, not {parts} parts': leave one of them out")
        split_evenly(out_features // parts, self.place.world_size, "out_features of a column-parallel layer")
        self.gather_output = gather_output
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        split = Split(0, out_features, self.place.world_size, parts)
        self.hold("weight", whole.weight, split)
        self.hold("bias", whole.bias, split)

    def forward(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Apply it; `lengths` are the ranks' parts of `sequence_dim` (None asks the ranks: one small all_gather)."""
        if self.sequence_dim is None:
            y = column_linear(x, self.weight, self.bias, self.group, self.chunks)
        else:
            lengths = lengths_of_part(x, self.sequence_dim, lengths, self.group)
            x = x.movedim(self.sequence_dim, 0)
            y = gather_column_linear(x, self.weight, self.bias, lengths, self.group, self.chunks)
            y = y.movedim(0, self.sequence_dim)
        if not self.gather_output:
            return y
        return gather_from_region(y, -1, self.group, self.splits["weight"].lengths)


class RowParallelLinear(_ParallelLinear):
    """A linear layer each rank of which takes its share of the inputs; the outputs are summed over the ranks.

    Input [..., share of in_features] as a column-parallel layer leaves it (with `scatter_input`: all of them, the same
    on every rank). Output [..., out_features], the same on every rank, or with `sequence_dim` this rank's part of that
    dim, by `split_evenly`. The bias is held by every rank and added once, after the sum; its gradient is that of the
    whole sequence. `chunks` as in `unisono.parallel.tensor.overlap`; weights are drawn as in `ColumnParallelLinear`.

    Raises UsageError if there are fewer inputs than ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        scatter_input: bool = False,
        sequence_dim: int | None = None,
        chunks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence_dim, chunks)
        split_evenly(in_features, self.place.world_size, "in_features of a row-parallel layer")
        self.scatter_input = scatter_input
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        self.hold("weight", whole.weight, Split(1, in_features, self.place.world_size))
        self.hold("bias", whole.bias)

    def forward(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Apply it; `lengths` are the parts of `sequence_dim` that each rank is to get (None: `split_evenly`)."""
        if self.scatter_input:
            x = scatter_to_region(x, -1, self.group, self.splits["weight"].lengths)
        if self.sequence_dim is None:
            y = row_linear(x, self.weight, self.group, self.chunks)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        lengths = lengths_of_whole(x, self.sequence_dim, lengths, self.group)
        y = row_scatter_linear(x.movedim(self.sequence_dim, 0), self.weight, lengths, self.group, self.chunks)
        y = y.movedim(0, self.sequence_dim)
        return y if self.bias is None else y + copy_to_region(self.bias, self.group).to(y.dtype)
