"""An embedding split by vocabulary that, tied, gives the logits as well; torch's RowwiseParallel only looks up.

Each rank looks up the tokens whose rows it holds and leaves zeros for the others; the sum over the ranks is the
embedding (Shoeybi et al. 2019, Megatron-LM, section 3). The vocabulary is cut unevenly where the ranks do not divide
it, so there are no padding rows to train or to save.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.shards import Group, Lengths, Sharded, Split, lengths_of_part, split_evenly
from unisono.parallel.tensor.overlap import column_linear, gather_column_linear
from unisono.parallel.tensor.regions import reduce_from_region, reduce_scatter_from_region

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(Sharded):
    """An embedding of `num_embeddings` rows, each rank holding its share: integer tokens [...] → [..., embedding_dim].

    The tokens must be the same on every rank, and so is the result; with `sequence_dim` (a dim of the tokens) it is
    this rank's part of it, by `split_evenly`. `padding_idx` as in `nn.Embedding`: the row whose gradient is zero.
    Weights are drawn whole from torch's default generator and cut, as with `ColumnParallelLinear`.

    Raises UsageError if there are fewer rows than ranks, and in forward, on all ranks, for a token outside the
    vocabulary.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        sequence_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings, self.embedding_dim, self.sequence_dim = num_embeddings, embedding_dim, sequence_dim
        lengths = split_evenly(num_embeddings, self.place.world_size, "the vocabulary")
        self.first = sum(lengths[: self.place.rank])
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.padding_idx = whole.padding_idx
        self.hold("weight", whole.weight, Split(0, num_embeddings, self.place.world_size))

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: Group = None, sequence_dim: int | None = None) -> Self:
        """The layer with this rank's rows of a whole embedding, copied.

        Raises UsageError for `max_norm`, `sparse` and `scale_grad_by_freq`, which it does not have.
        """
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(embedding, option):
                raise UsageError(f"a vocabulary-parallel embedding has no {option}: switch it off")
        rows, width, dtype = embedding.num_embeddings, embedding.embedding_dim, embedding.weight.dtype
        return cls(
            rows, width, embedding.padding_idx, group=group, sequence_dim=sequence_dim, device="meta", dtype=dtype
        ).adopt(embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look the tokens up."""
        self._check(tokens)
        local, rows = tokens - self.first, self.weight.shape[0]
        elsewhere = (local < 0) | (local >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_dim is None:
            return reduce_from_region(found, self.group)
        return reduce_scatter_from_region(found, self.sequence_dim % tokens.dim(), self.group)

    def logits(self, hidden: Tensor, lengths: Lengths = None) -> Tensor:
        """This rank's share of the logits, hidden · weightᵀ: [..., embedding_dim] → [..., share of num_embeddings].

        `hidden` is what `forward` returns in shape: the same on every rank, or with `sequence_dim` its part of the
        sequence (`lengths` are the ranks' parts; None asks them), for which the logits are of the whole sequence.
        """
        if self.sequence_dim is None:
            return column_linear(hidden, self.weight, None, self.group, chunks=1)
        dim = self.sequence_dim % (hidden.dim() - 1)
        lengths = lengths_of_part(hidden, dim, lengths, self.group)
        logits = gather_column_linear(hidden.movedim(dim, 0), self.weight, None, lengths, self.group, chunks=1)
        return logits.movedim(0, dim)

    def _check(self, tokens: Tensor) -> None:
        if tokens.numel() == 0:
            return
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.num_embeddings:
            token = low if low < 0 else high
            raise UsageError(
                f"token {token} is outside the vocabulary of {self.num_embeddings}: "
                f"tokens are 0 … {self.num_embeddings - 1}"
            )
