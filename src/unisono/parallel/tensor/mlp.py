"""Two ways to split a stack of linear layers, checked to fit; torch's parallelize_module leaves that to its plan.

`ParallelMLP` (column, activation, row) sums once: one all_reduce forward, one backward (Shoeybi et al. 2019).
`ColumnwiseMLP` is the textbook's: every layer is split by column and its activations are gathered, so that each layer
sees all of them: an all_gather per layer forward, an all_reduce backward. It works for any stack, at twice the calls.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.shards import Group, Lengths
from unisono.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnwiseMLP", "ParallelMLP"]

Activation = Callable[[Tensor], Tensor]


class ParallelMLP(nn.Module):
    """out(activation(hidden(x))) with `hidden` split by column and `out` by row: [..., width] → [..., width].

    Made of two whole layers, whose weights are cut. `activation` must work element by element. With `sequence_dim`
    input and output are this rank's part of that dim. `chunks` as in `unisono.parallel.tensor.overlap`. Raises
    UsageError if the second layer does not take what the first gives, or if there are fewer hidden features than ranks.
    """

    def __init__(
        self,
        hidden: nn.Linear,
        out: nn.Linear,
        activation: Activation = F.gelu,
        *,
        group: Group = None,
        sequence_dim: int | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        _check_chain([hidden, out])
        self.activation = activation
        self.hidden = ColumnParallelLinear.from_linear(hidden, group=group, sequence_dim=sequence_dim, chunks=chunks)
        self.out = RowParallelLinear.from_linear(out, group=group, sequence_dim=sequence_dim, chunks=chunks)

    def forward(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """Apply it; `lengths` are the ranks' parts of `sequence_dim` (None asks the ranks: one small all_gather)."""
        y: Tensor = self.out(self.activation(self.hidden(x, lengths)), lengths)
        return y


class ColumnwiseMLP(nn.Module):
    """Linear layers with an activation between, each split by column, its outputs gathered: [..., in] → [..., out].

    Made of whole layers, whose weights are cut. Input and output are the same on every rank. Raises UsageError if a
    layer does not take what the one before gives, or has fewer outputs than there are ranks.
    """

    def __init__(self, layers: Sequence[nn.Linear], activation: Activation = F.relu, *, group: Group = None) -> None:
        super().__init__()
        _check_chain(layers)
        self.activation = activation
        cut = [ColumnParallelLinear.from_linear(layer, group=group, gather_output=True) for layer in layers]
        self.layers = nn.ModuleList(cut)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers; no activation follows the last."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        y: Tensor = self.layers[-1](x)
        return y


def _check_chain(layers: Sequence[nn.Linear]) -> None:
    if not layers:
        raise UsageError("an MLP needs at least one layer")
    for number, (first, second) in enumerate(pairwise(layers)):
        if first.out_features != second.in_features:
            raise UsageError(
                f"layer {number} gives {first.out_features} features, but layer {number + 1} takes {second.in_features}"
            )
