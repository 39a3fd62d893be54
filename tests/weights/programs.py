"""What test_torchruns.py starts: a trainer or a replica of two ranks, under torchrun, until it is ended.

torchrun --nproc-per-node 2 programs.py trainer|replica ADDRESS FIRST OUT
"""

import json
import os
import sys
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono import weights
from unisono.errors import UnisonoError


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 151), nn.ReLU(), nn.Linear(151, 16))


def train(address: str, first: int, out: str) -> None:
    model = make()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    version = first
    with weights.Sender(address, model) as sender:
        while True:
            optimizer.zero_grad()
            model(torch.full((4, 16), float(version))).square().mean().backward()
            optimizer.step()
            with suppress(UnisonoError):  # a replica that is lost costs one update
                if sender.push(version).receivers:
                    note(out, version, sender.checksums())
            version += 1
            time.sleep(0.05)


def serve(address: str, out: str) -> None:
    model = make()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with weights.Receiver(address, model, name="engine") as receiver:
        while True:
            with suppress(UnisonoError):  # so does a sender
                report = receiver.pull()
                receiver.verify()
                note(out, report.version, receiver.checksums())


def note(out: str, version: int, sums: dict[str, str]) -> None:
    """One line per version and rank."""
    with open(f"{out}.{dist.get_rank()}", "a") as file:
        file.write(json.dumps([version, os.getpid(), sums]) + "\n")


if __name__ == "__main__":
    side, address, first, out = sys.argv[1:]
    dist.init_process_group("unisono")
    train(address, int(first), out) if side == "trainer" else serve(address, out)
