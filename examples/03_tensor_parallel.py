"""Tensor parallel: one transformer block split over all ranks, trained beside the same block in one process.

torchrun --nproc-per-node 2 examples/03_tensor_parallel.py               (BACKEND=gloo for another backend)
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono.parallel import tensor

VOCABULARY, WIDTH, HEADS, STEPS = 29, 32, 4, 30  # 29 divides by no number of ranks: some hold a row more


class Block(nn.Module):
    """Embedding, attention, MLP and tied logits, all in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.query_key_value, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        heads = self.query_key_value(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.out(F.gelu(self.hidden(x)))
        return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), targets.flatten())


class SplitBlock(nn.Module):
    """The same, each rank holding its share of every weight."""

    def __init__(self, whole: Block) -> None:
        super().__init__()
        self.embedding = tensor.VocabParallelEmbedding.from_embedding(whole.embedding)
        self.attention = tensor.ParallelAttention(whole.query_key_value, whole.mix, HEADS, causal=True)
        self.mlp = tensor.ParallelMLP(whole.hidden, whole.out)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.mlp(x)
        return tensor.parallel_cross_entropy(self.embedding.logits(x), targets, VOCABULARY)


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    torch.manual_seed(0)  # the same whole weights, and below the same tokens, on all ranks
    alone = Block()
    models = {"in one process": alone, "split": SplitBlock(copy.deepcopy(alone))}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    tokens = torch.randint(VOCABULARY, (8, 16))
    for step in range(STEPS):
        losses = {}
        for name, model in models.items():
            optimizers[name].zero_grad()
            loss = model.loss(tokens, tokens.roll(-1, 1))
            loss.backward()
            optimizers[name].step()
            losses[name] = loss.item()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: " + ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    whole = tensor.full_state_dict(models["split"])["embedding.weight"]
    apart = (whole - alone.embedding.weight).abs().max().item()
    if dist.get_rank() == 0:
        rows = len(models["split"].embedding.weight)
        print(f"rank 0 holds {rows} of {VOCABULARY} rows; embeddings differ by {apart:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
