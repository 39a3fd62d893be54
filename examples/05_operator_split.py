"""Operator split of a small ResNet: seq1 to layer2 on one rank, layer3 to fc on the other, and how a profiler sees it.

    torchrun --nproc-per-node 2 examples/05_operator_split.py

Each rank runs, and updates, its own half: activations go over, gradients come back. The same halves run in one process
on two devices too (here both are the CPU; ["cuda:0", "cuda:1"] on a machine that has them).
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from unisono.parallel.pipeline import ModelParallel, distribute_parts, split_model


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.around(x))


def resnet(classes: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("seq1", nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()))
    for number, (before, after, stride) in enumerate([(8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 64, 2)], 1):
        net.add_module(f"layer{number}", Block(before, after, stride))
    net.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc", nn.Linear(64, classes))
    return net


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    rank = dist.get_rank()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)

    whole = ModelParallel(split_model(resnet(), before=["layer3"]), ["cpu", "cpu"])  # both halves in this process
    parts = split_model(resnet(), before=["layer3"])  # this process's half, and one that is not used
    split = distribute_parts(parts, F.cross_entropy)
    print(f"rank {rank} holds {' '.join(name for name, _ in parts[rank].named_children())}", flush=True)
    updates = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (whole, parts[rank])]

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(10):
            for optimizer in updates:
                optimizer.zero_grad()
            F.cross_entropy(whole(images), labels).backward()
            split.step(images, labels)
            for optimizer in updates:
                optimizer.step()
    pairs = zip(parts[rank].parameters(), whole.parts[rank].parameters(), strict=True)
    if rank == 0:
        differ = max((mine - other).abs().max().item() for mine, other in pairs)
        for event in sorted(trace.key_averages(), key=lambda event: event.key):
            if event.key.startswith(("split", "pipeline")):
                print(f"{event.key:32} {event.count:3} times {event.cpu_time_total / event.count / 1e3:7.2f} ms")
        print(f"after 10 steps the weights of two ranks and of one process differ by {differ:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
