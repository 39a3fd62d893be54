"""A rank's share of a transformer, some layers (pp) and some heads of each (tp); torch has no rule for fused heads.

A stage's parameters have the names they have in the whole model. Embedding and output layer share their weights; in a
pipeline the first and the last stage have a copy each, under the one name, which `TiedWeight` keeps equal.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unisono.parallel.mesh.transformer import Block, Rotary, Transformer
from unisono.parallel.sequence.layout import Layout, sequence_positions
from unisono.parallel.sequence.ring_attention import ring_attention
from unisono.parallel.shards import place
from unisono.parallel.tensor.attention import Attend, ParallelAttention
from unisono.parallel.tensor.embedding import VocabParallelEmbedding
from unisono.parallel.tensor.mlp import ParallelMLP

__all__ = ["TransformerStage"]


class TransformerStage(nn.Module):
    """Consecutive layers of a transformer, this rank's share of each, copied from the whole model.

    The stage with layer 0 takes tokens, int64 [batch, time]; others what the stage before returns, [batch, time,
    width]. The one with the last layer returns this tp rank's share of the logits, [batch, time, share of vocabulary].
    Time is the whole context; with an sp axis it is this rank's positions, as `sequence_positions` has them.
    """

    def __init__(self, whole: Transformer, layers: range, mesh: DeviceMesh) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(whole.blocks)
        self.width = whole.width
        group = mesh.get_group("tp")
        if self.is_first or self.is_last:
            self.embedding = VocabParallelEmbedding.from_embedding(whole.embedding, group=group)
        positions = torch.arange(whole.context)
        attend: Attend | None = None
        sequence = mesh.get_group("sp")
        if (ranks := place(sequence).world_size) > 1:
            lengths = Layout("zigzag", whole.context, ranks).lengths
            positions = sequence_positions(whole.context, sequence)
            attend = partial(ring_attention, group=sequence, causal=True, lengths=lengths)
        rotate = Rotary(whole.width // whole.heads, positions)
        self.blocks = nn.ModuleDict()
        for layer in layers:
            source = whole.get_submodule(f"blocks.{layer}")
            attention = ParallelAttention(
                source.get_submodule("attention.query_key_value"),  # type: ignore[arg-type]
                source.get_submodule("attention.out"),  # type: ignore[arg-type]
                whole.heads,
                group=group,
                causal=True,
                rotate=rotate,
                attend=attend,
            )
            hidden, out = source.get_submodule("mlp.hidden"), source.get_submodule("mlp.out")
            mlp = ParallelMLP(hidden, out, group=group)  # type: ignore[arg-type]
            norms = [copy.deepcopy(source.get_submodule(name)) for name in ("attention_norm", "mlp_norm")]
            self.blocks[str(layer)] = Block(norms[0], attention, norms[1], mlp)
        if self.is_last:
            self.norm = copy.deepcopy(whole.norm)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        if self.is_first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.embedding.logits(self.norm(x)) if self.is_last else x

    def infer(self, x: Tensor) -> Tensor:
        """A tensor without data of the form that `forward` returns for `x`; nothing is computed or sent."""
        features = self.embedding.weight.shape[0] if self.is_last else self.width
        dtype = next(self.parameters()).dtype
        return torch.empty(*x.shape[:2], features, dtype=dtype, device="meta")
