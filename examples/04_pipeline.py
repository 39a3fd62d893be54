"""A pipeline with its backward: microbatches travel while ranks compute; the bubble measured next to the predicted one.

    torchrun --nproc-per-node 4 examples/04_pipeline.py 1f1b        # or gpipe, interleaved, zb-h1, zb-v

`BACKEND=gloo` in front runs the same on another backend.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from unisono import build
from unisono.parallel.pipeline import Pipeline, stages_from_layers

WIDTH, ROWS, MICROBATCHES, STEPS = 128, 64, 8, 20


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(10)]
    return [nn.Linear(16, WIDTH), *hidden, nn.Linear(WIDTH, 10)]


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name = sys.argv[1] if len(sys.argv) > 1 else "1f1b"

    # 1. a schedule is data: which rank does what, in which order
    schedule = build(name, "pipeline", world_size, microbatches=MICROBATCHES)
    if rank == 0:
        print(schedule)

    # 2. every rank takes its stages of the model, and an optimizer for them
    model = layers()
    stages = stages_from_layers(model, schedule)
    pipeline = Pipeline(stages, schedule, F.cross_entropy)
    optimizer = torch.optim.AdamW(nn.ModuleList(stages).parameters(), lr=2e-3)

    # 3. train; the rows do not divide among the microbatches, and need not
    inputs = torch.randn(ROWS - 3, 16)
    targets = inputs[:, :10].argmax(1)
    one_process = F.cross_entropy(nn.Sequential(*model)(inputs), targets).item()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        loss = torch.zeros(()) if loss is None else loss
        dist.broadcast(loss, src=schedule.ranks[schedule.num_stages - 1])
        if rank == 0 and step == 0:
            print(f"first loss {loss:.6f}, of one process {one_process:.6f}")
    if rank == 0:
        print(f"loss after {STEPS} steps: {loss:.3f}")

    # 4. how idle was everybody, and how idle need they have been?
    report = pipeline.report()
    if rank == 0:
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
