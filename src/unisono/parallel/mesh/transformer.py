"""A small transformer, decoder only, of parts with names by which a mesh cuts it; torch's own has no rotary positions.

    tokens ─ embed ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─ … ─ norm ─ logits over the vocabulary
                    └────────────────────────┘

Pre-norm blocks with causal attention and rotary positions (Su et al. 2021, RoFormer); the output layer shares the
embedding's weights. Nothing in here knows of several ranks; `unisono.parallel.mesh.stage` cuts it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import UsageError

__all__ = ["MLP", "Attention", "Block", "Rotary", "Transformer"]


class Rotary(nn.Module):
    """Turns each pair of features by an angle that grows with its position: [..., time, features] → the same.

    positions: int64 [time or more], the places in the sequence of what it will be given.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, features: int, positions: Tensor) -> None:
        super().__init__()
        half = features // 2
        angles = torch.outer(positions, 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Turn the first positions of the table."""
        cosine, sine = self.cosine[: heads.shape[-2]], self.sine[: heads.shape[-2]]
        left, right = heads.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention, [batch, time, width] → the same."""

    def __init__(self, width: int, heads: int, rotate: Rotary) -> None:
        super().__init__()
        self.heads, self.rotate = heads, rotate
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class MLP(nn.Module):
    """One hidden layer of four times the width, [..., width] → the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Think."""
        y: Tensor = self.out(F.gelu(self.hidden(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each added to the stream it reads: [batch, time, width] → the same."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(self, stream: Tensor) -> Tensor:
        """Read, add, read, add."""
        stream = stream + self.attention(self.attention_norm(stream))
        thought: Tensor = self.mlp(self.mlp_norm(stream))
        return stream + thought


class Transformer(nn.Module):
    """Logits of the next token at every position.

    Weights are drawn from torch's default generator: seed it to have the same model on every rank. Raises UsageError
    unless the width divides by twice the number of heads.
    """

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int = 256) -> None:
        super().__init__()
        if width % (2 * heads):
            raise UsageError(f"a width of {width} does not make {heads} heads of an even width")
        self.width, self.heads, self.context, self.vocabulary = width, heads, context, vocabulary
        rotate = Rotary(width // heads, torch.arange(context))
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(nn.RMSNorm(width), Attention(width, heads, rotate), nn.RMSNorm(width), MLP(width))
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Normal weights; the layers that write into the stream start small, so that a deep stack starts calm."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith("out.weight")
                deviation = 0.5 * weight.shape[1] ** -0.5 / (2 * len(self.blocks)) ** (0.5 * writes)
                nn.init.normal_(weight, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time ≤ context) integer tokens → (batch, time, vocabulary) logits."""
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        return F.linear(self.norm(stream), self.embedding.weight)
