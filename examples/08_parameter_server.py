"""A parameter server and all_reduce on the same task: loss, bytes in and out of rank 0, seconds.

The server counts its bytes; those of all_reduce are a ring's by formula, whatever algorithm the backend takes.

torchrun --nproc-per-node 4 examples/08_parameter_server.py               (BACKEND=gloo for another backend)
"""

import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parameter_server import ParameterServer, PsWorker
from torch import Tensor, nn

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono.parallel.data import DistributedDataParallel
from unisono.units import show_nbytes, show_seconds

STEPS, LEARNING_RATE = 40, 0.2


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * rank + step))
    return F.mse_loss(model(inputs), inputs.cumsum(dim=1).sin())


def by_all_reduce(net: nn.Module, rank: int, world_size: int) -> tuple[nn.Module, int]:
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    nbytes = sum(weight.nbytes for weight in net.parameters())
    return net, 2 * STEPS * 2 * (world_size - 1) * nbytes // world_size


def by_server(net: nn.Module, rank: int, staleness: int | None) -> tuple[nn.Module, int]:
    """Rank 0 serves in a thread and works as well, so that all ranks compute as many gradients as above."""
    everybody = list(range(dist.get_world_size()))
    if rank == 0:
        optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
        with ParameterServer(net, optimizer, everybody, staleness=staleness).in_thread() as server:
            work(PsWorker(copy.deepcopy(net), server), rank)
        return net, server.report.received_nbytes + server.report.sent_nbytes
    work(PsWorker(net, server=0), rank)
    return net, 0


def work(worker: PsWorker, rank: int) -> None:
    with worker:
        for step in range(STEPS):
            worker.pull()
            loss_of(worker.module, rank, step).backward()
            worker.push()


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ways = {"all_reduce (ring)": None, "server, synchronous": None, "server, staleness 2": 2}
    for number, (name, staleness) in enumerate([*ways.items(), *ways.items()]):  # the first round only warms up
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
        dist.barrier()
        begin = time.perf_counter()
        by_ring = name.startswith("all_reduce")
        net, nbytes = by_all_reduce(net, rank, world_size) if by_ring else by_server(net, rank, staleness)
        seconds = time.perf_counter() - begin
        if rank == 0 and number >= len(ways):
            loss = sum(loss_of(net, peer, STEPS).item() for peer in range(world_size)) / world_size
            print(f"{name:20} loss {loss:.4f}  {show_nbytes(nbytes):>8} at rank 0  {show_seconds(seconds)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
