"""Data parallel by hand: each rank computes on its own rows, every gradient is averaged, all take the same step.

torchrun --nproc-per-node 2 examples/01_data_parallel_by_hand.py          (BACKEND=gloo for another backend)
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono.parallel.data import assert_replicas_equal

STEPS, ROWS = 60, 64


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(1)  # the same data on all ranks, of which each takes its rows

    for step in range(STEPS):
        inputs = torch.rand(ROWS, 2, generator=data) * 2 - 1
        targets = inputs.prod(dim=1, keepdim=True)
        mine = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        loss = F.mse_loss(model(inputs[mine]), targets[mine])

        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {mean.item():.4f}")

    assert_replicas_equal(model)  # an error would name the first parameter that differs, and on which ranks
    if rank == 0:
        print(f"{world_size} ranks hold the same weights, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
