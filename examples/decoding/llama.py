"""One rank's part of a small Llama with random weights, for greedy decoding of one sequence.

Split as Megatron-LM does (Shoeybi et al. 2019): heads and hidden features over the ranks, two sums over the ranks a
layer, each followed by the residual's add and a norm. A step reads and writes tensors alone and never comes back to the
host, so that a CUDA graph can replay it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AddAndNorm", "Llama", "Shape"]

AddAndNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called with a rank's part of a sum, the residual, the norm's weight; gives the norm and the new residual."""


@dataclass(frozen=True)
class Shape:
    """Sizes; ``steps``: tokens to write, and positions of the cache."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    steps: int


class Llama:
    """Weights and cache of this rank; the embedding, which is also the output layer, is whole on every rank.

    All ranks draw the same whole weights from one seed and keep their part.
    """

    def __init__(self, shape: Shape, rank: int, ranks: int, device: str, dtype: torch.dtype) -> None:
        self.shape, self.rank, self.ranks, self.device, self.dtype = shape, rank, ranks, device, dtype
        self.chance = torch.Generator(device).manual_seed(0)
        self.layers = [self._layer() for _ in range(shape.layers)]
        self.embedding = self._draw(shape.vocabulary, shape.width, 0, 1)
        self.gain = torch.ones(shape.width, device=device, dtype=dtype)
        self.text = torch.zeros(shape.steps, dtype=torch.int64, device=device)
        self.token, self.position = self.text[:1].clone(), self.text[:1].clone()
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.steps), 10_000.0 ** -(torch.arange(half) / half)).to(device)
        self.places, self.turns = torch.arange(shape.steps, device=device), torch.polar(torch.ones_like(angles), angles)

    def _draw(self, rows: int, columns: int, dim: int, parts: int) -> Tensor:
        """This rank's part along ``dim`` of a whole weight."""
        chance, width = self.chance, columns**-0.5
        whole = torch.randn(rows, columns, generator=chance, device=self.device, dtype=self.dtype) * width
        return whole.chunk(parts, dim)[self.rank % parts].clone()

    def _layer(self) -> tuple[Tensor, ...]:
        """Weights of query, key and value; of attention's output; of gate and up; of down; and two caches."""
        width, hidden, n = self.shape.width, 3 * self.shape.width, self.ranks
        query_key_value = torch.cat([self._draw(width, width, 0, n) for _ in range(3)])
        out = self._draw(width, width, 1, n)
        gate_up = torch.cat([self._draw(hidden, width, 0, n) for _ in range(2)])
        down = self._draw(width, hidden, 1, n)
        cache = (2, self.shape.heads // n, self.shape.steps, width // self.shape.heads)
        return query_key_value, out, gate_up, down, *torch.zeros(cache, device=self.device, dtype=self.dtype)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary positions (Su et al. 2021)."""
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * self.turns[self.position]
        return torch.view_as_real(turned).flatten(-2).to(self.dtype)

    def step(self, add_and_norm: AddAndNorm) -> None:
        """Reads token and position, writes the token at that position and the next ones."""
        head, past = self.shape.width // self.shape.heads, (self.places <= self.position)[None, None, None]
        x = self.embedding[self.token]
        norm = F.rms_norm(x, self.gain.shape, self.gain, 1e-6)
        for query_key_value, out, gate_up, down, keys, values in self.layers:
            query, key, value = F.linear(norm, query_key_value).view(3, -1, 1, head)
            keys.index_copy_(1, self.position, self._rotate(key))
            values.index_copy_(1, self.position, value)
            mixed = F.scaled_dot_product_attention(self._rotate(query)[None], keys[None], values[None], past)
            norm, x = add_and_norm(F.linear(mixed.view(1, -1), out), x, self.gain)
            gate, up = F.linear(norm, gate_up).chunk(2, -1)
            norm, x = add_and_norm(F.linear(F.silu(gate) * up, down), x, self.gain)
        self.token.copy_(F.linear(norm, self.embedding).argmax(-1))
        self.text.index_copy_(0, self.position, self.token)
        self.position += 1

    def begin(self) -> None:
        """Back to the first position, with token 0."""
        self.position.zero_()
        self.token.zero_()
