"""torch's DistributedDataParallel and unisono.parallel's side by side, then what only the second does.

torchrun --nproc-per-node 2 examples/02_ddp.py                            (BACKEND=gloo for another backend)
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono.parallel import data


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.manual_seed(rank + 1)
    batches = [(torch.randn(8, 16), torch.randint(10, (8,))) for _ in range(20)]

    theirs, ours = copy.deepcopy(net), data.DistributedDataParallel(net)
    train(DistributedDataParallel(theirs), batches)  # not kept: on Gloo a DDP that outlives its group can hang
    train(ours, batches)
    if rank == 0:
        print(f"after 20 steps the weights of torch's DDP and ours differ by {difference(theirs, ours):.0e}")

    # Uneven ranks: rank r has 8 - 2 r batches of r + 1 rows. The gradient is the mean over all rows of a step.
    uneven = [(inputs[: rank + 1], targets[: rank + 1]) for inputs, targets in batches[: 8 - 2 * rank]]
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    steps = 0
    for batch in ours.join(uneven, count=lambda batch: len(batch[0])):
        optimizer.zero_grad()
        if batch is None:  # this rank has no more data, others have
            ours.skip()
        else:
            loss = F.cross_entropy(ours(batch[0]), batch[1], reduction="sum") / ours.mean_count
            loss.backward()
        optimizer.step()
        steps += 1
    print(f"rank {rank}: {len(uneven)} batches, {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
