"""A small training under DDP or FSDP2 whose state outlives ranks: copies of it, and how to go on from them."""

import os
import socket
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

ROWS, INPUTS, HIDDEN, OUTPUTS = 24, 24, 48, 12  # 2, 3 and 4 ranks divide them all
WRAPPERS = {"plain": lambda model: model, "ddp": DistributedDataParallel, "fsdp": fully_shard}


class Training:
    """A model, wrapped for the ranks of the present group, or ``plain``; ``wholes``: what it goes on from, if any."""

    def __init__(self, kind: str, wholes: Sequence[Tensor] = ()) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
        self.model = WRAPPERS[kind](layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        for p in self.model.parameters():
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        alone = kind == "plain"
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.shards = self.size if kind == "fsdp" else 1
        for mine, whole in zip(self.held(), wholes, strict=bool(wholes)):
            mine.copy_(whole.chunk(self.shards)[self.rank % self.shards].view_as(mine))
        self.keepers = keepers() if self.shards > 1 else []

    def held(self) -> list[Tensor]:
        """What this rank holds: parameters and momenta, of FSDP2 its shards of them."""
        every = [t for p in self.model.parameters() for t in (p, self.optimizer.state[p]["momentum_buffer"])]
        return [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in every]

    def step(self, number: int) -> float:
        """One step on this rank's rows; returns their loss. Those of all are the same, however many ranks there are."""
        x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(number))[self.rank :: self.size]
        loss = (self.model(x) - x[:, :OUTPUTS].sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def copies(self) -> dict[int, Tensor]:
        """By number of the shard: this rank's state as one tensor, and those that it keeps for other ranks."""
        mine = torch.cat([t.reshape(-1) for t in self.held()])
        found = {self.rank % self.shards: mine}
        if self.shards > 1:
            others = {q: torch.empty_like(mine) for q, keeper in enumerate(self.keepers) if keeper == self.rank}
            send = dist.P2POp(dist.isend, mine, self.keepers[self.rank])
            for work in dist.batch_isend_irecv([send, *(dist.P2POp(dist.irecv, t, q) for q, t in others.items())]):
                work.wait()
            found |= others
        return found


def keepers() -> list[int]:
    """For every rank, which one keeps a copy for it: one of another host, where there is one; else the next."""
    size = dist.get_world_size()
    homes = [""] * size
    dist.all_gather_object(homes, socket.gethostname())
    far = [[q for q in range(size) if homes[q] != home] for home in homes]
    return [others[r % len(others)] if others else (r + 1) % size for r, others in enumerate(far)]


def gather(shards: int, mine: Mapping[int, Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The whole tensors, from what the ranks that are left have of ``shards``; ``shapes``: of one rank's parts."""
    have: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(have, list(mine))
    if lost := set(range(shards)) - {shard for each in have for shard in each}:
        raise SystemExit(f"shards {sorted(lost)} are lost, with all that had a copy of them")
    every = []
    for shard in range(shards):
        flat = mine[shard] if shard in mine else torch.empty_like(next(iter(mine.values())))
        dist.broadcast(flat, next(rank for rank, shards_there in enumerate(have) if shard in shards_there))
        every.append(flat.split([shape.numel() for shape in shapes]))
    return [torch.cat(parts) for parts in zip(*every, strict=True)]


def finish(kind: str, curve: list[float], marks: list[int], wholes: list[Tensor]) -> None:
    """Compares with a training that has lost nobody, and draws the loss."""
    alone = Training("plain")
    for step in range(len(curve)):
        alone.step(step)
    off = max((a - b.view_as(a)).abs().max().item() for a, b in zip(alone.held(), wholes, strict=True))
    print(f"loss {curve[0]:.4f} to {curve[-1]:.4f}; parameters differ from one process's by {off:.0e}")
    axes = (figure := Figure(figsize=(7, 4))).subplots()
    axes.plot(curve, label=f"{kind}, from {os.environ['WORLD_SIZE']} ranks to {dist.get_world_size()}")
    for mark in marks:
        axes.axvline(mark, color="tab:red", linestyle=":", label="_" * (mark != marks[0]) + "ranks are lost")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(f"survivors-{kind}.png")
