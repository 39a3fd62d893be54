"""The model of the main job: a small transformer that reads bytes and guesses the next one."""

import torch
from torch import Tensor

from unisono.parallel.mesh.transformer import Transformer
from unisono.train.settings import VOCABULARY, ModelShape

__all__ = ["ByteTransformer"]


class ByteTransformer(Transformer):
    """Logits of the next byte at every position: (batch, time ≤ context) integers → (batch, time, 256).

    Weights are drawn from torch's default generator: seed it to have the same model on every rank.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.width, shape.layers, shape.heads, shape.context, VOCABULARY)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
        """The `length` bytes that follow a prompt of at least one byte, drawn at the given temperature."""
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            logits: Tensor = self(torch.tensor([text[-self.context :]]))
            odds = torch.softmax(logits[0, -1] / temperature, dim=-1)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
        return bytes(text[len(prompt) :])
