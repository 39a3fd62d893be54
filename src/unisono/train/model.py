"""A small byte-level transformer, decoder only: read bytes, guess the next one.

    bytes ─ embed ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─ … ─ norm ─ logits over 256 bytes
                   └────────────────────────┘

Pre-norm blocks with causal attention and rotary positions (Su et al. 2021, RoFormer); the output layer shares the
embedding's weights. It is plain torch: nothing in here knows that it will be trained on several ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.train.settings import ModelShape

__all__ = ["ByteTransformer"]

VOCABULARY = 256


class _Block(nn.Module):
    """Attention and MLP, each added to the stream it reads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, time, width) → the same shape."""
        batch, time, width = stream.shape
        heads = self.query_key_value(self.attention_norm(stream)).view(batch, time, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        thought: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))
        return stream + thought


class ByteTransformer(nn.Module):
    """Logits of the next byte at every position.

    Weights are drawn from torch's default generator: seed it to have the same model on every rank.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Normal weights; the layers that write into the stream start small, so that a deep stack starts calm."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith(("attention_out.weight", "mlp_out.weight"))
                deviation = 0.5 * weight.shape[1] ** -0.5 / (2 * self.shape.layers) ** (0.5 * writes)
                nn.init.normal_(weight, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time ≤ context) integer tokens → (batch, time, 256) logits."""
        time = tokens.shape[1]
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream, self.cosine[:time], self.sine[:time])
        return F.linear(self.norm(stream), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
        """The `length` bytes that follow a prompt of at least one byte, drawn at the given temperature."""
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            window = torch.tensor([text[-self.shape.context :]])
            odds = torch.softmax(self(window)[0, -1] / temperature, dim=-1)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
        return bytes(text[len(prompt) :])


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of features of (batch, heads, time, features) by an angle that grows with its position."""
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)
