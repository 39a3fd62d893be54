"""Two hosts: unisono inside each, Gloo between them, joined into one all_reduce and into the gradients of DDP.

Shared memory ends where the host does, so no unisono group may span hosts; one per host may. With the address of the
first host, which both can reach, run the same on each, but for the node rank:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr 10.0.0.1 examples/09_two_hosts.py
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr 10.0.0.1 examples/09_two_hosts.py

On one host, give both 127.0.0.1. GLOO_SOCKET_IFNAME names the network interface where Gloo takes the wrong one.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)


class Hosts:
    """The ranks of the job as a table: a row per host, and in it the ranks that torchrun numbered there."""

    def __init__(self) -> None:
        self.per_host, self.local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        table = torch.arange(dist.get_world_size()).view(-1, self.per_host)
        # Every rank makes every group, in one order, and keeps the two that it is a member of.
        inside = [dist.new_group(row, backend="unisono") for row in table.tolist()]
        between = [dist.new_group(column, backend="gloo") for column in table.T.tolist()]
        self.inside, self.between = inside[dist.get_rank() // self.per_host], between[self.local]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place: each rank sends its part of the host's sum, and no more, to other hosts."""
        parts = list(tensor.view(-1).tensor_split(self.per_host))  # may differ by one element
        mine = torch.empty_like(parts[self.local])
        dist.reduce_scatter(mine, parts, group=self.inside)
        dist.all_reduce(mine, group=self.between)
        dist.all_gather(parts, mine, group=self.inside)  # the parts are views of the tensor
        return tensor

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The same as DDP's communication hook."""
        done: Future[Tensor] = Future()
        done.set_result(self.all_reduce(bucket.buffer()) / dist.get_world_size())
        return done


def main() -> None:
    dist.init_process_group("gloo")  # all ranks of all hosts
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts = Hosts()
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    flat = x.clone()
    dist.all_reduce(flat)
    torch.testing.assert_close(hosts.all_reduce(x), flat, rtol=1e-5, atol=1e-5)
    print(f"rank {rank}, number {hosts.local} on host {rank // hosts.per_host}: equal to a flat all_reduce")

    for name in ("flat", "by hosts"):
        torch.manual_seed(0)  # the same weights and rows on all ranks, both times
        model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
        if name == "by hosts":
            model.register_comm_hook(hosts, Hosts.average)
        rows = torch.randn(8 * world_size, 16)[rank::world_size]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.mse_loss(model(rows), rows.square().mean(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"DDP, {name}: loss {loss.item():.5f} on rank 0 in step 30")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
