"""Training steps on GPUs by unisono and by plain NCCL: times, and losses over 50 steps.

torchrun --standalone --nproc-per-node 2 benchmarks/gpu/training_steps.py [--models small] [--steps 50] [--json FILE]

DDP, FSDP2 (`fully_shard` on every block and on the whole), tensor parallel by DTensor, and on 4 GPUs or more HSDP, as
torch has them; nothing but the process group differs. Both take turns, step by step, in the same processes.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unisono  # noqa: F401
from unisono.bench.result import this_machine
from unisono.gpu.devices import describe_gpus

WAYS = ("unisono", "nccl")
VOCABULARY, WARM_UP = 4096, 5
MODELS = {"small": (512, 8, 8, 256, 8), "large": (2048, 8, 16, 1024, 4)}
"""Width, blocks, heads, context, sequences of a rank."""


class Block(nn.Module):
    """Causal attention and a gated MLP, whose layers DTensor can split by heads and by features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] → the same."""
        y = self.norm(x)
        heads = [
            layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A decoder-only transformer of those blocks."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.logits = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def wrapped(model: Model, kind: str, groups: dict[str, Any]) -> nn.Module:
    """The model as a kind of parallelism has it; ``groups``: of all ranks, and of the axes of HSDP."""
    whole = groups["all"]
    if kind == "DDP":
        return DistributedDataParallel(model, process_group=whole)
    if kind == "TP":
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        mesh = DeviceMesh.from_group(whole, "cuda")
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model
    mesh = DeviceMesh.from_group(whole, "cuda")
    if kind == "HSDP":
        ranks = torch.arange(dist.get_world_size()).view(2, -1)
        mesh = DeviceMesh.from_group(groups["axes"], "cuda", mesh=ranks, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass
class Training:
    """One way's model, its losses and the milliseconds of its steps."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        mixed = len({type(parameter) for parameter in self.model.parameters()}) > 1  # tensor parallel: DTensors too
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, foreach=False if mixed else None)

    def step(self, windows: Tensor) -> None:
        """Forward, backward, optimizer, until the GPU is done."""
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - began))
        self.losses.append(loss.item())


def compared(name: str, kind: str, groups: dict[str, Any], steps: int) -> dict[str, Any]:
    """Both ways over the same data: a repeating text, so that losses fall."""
    width, blocks, heads, context, batch = MODELS[name]
    trainings = {}
    for way in WAYS:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Model(width, blocks, heads)
        trainings[way] = Training(wrapped(model, kind, groups[way]))
    text = torch.arange(1 << 16, device="cuda") ** 2 % 4093 % VOCABULARY
    chance = torch.Generator().manual_seed(0 if kind == "TP" else dist.get_rank())
    for step in range(steps):
        starts = torch.randint(len(text) - context - 1, (batch,), generator=chance).cuda()
        windows = text[starts[:, None] + torch.arange(context + 1, device="cuda")]
        for way in WAYS if step % 2 else WAYS[::-1]:
            trainings[way].step(windows)
    row: dict[str, Any] = {"model": name, "kind": kind, "ranks": dist.get_world_size()}
    for way, training in trainings.items():
        times = torch.tensor(training.times[WARM_UP:], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)  # each step's on its slowest rank
        row[way] = {"ms": statistics.median(times.tolist()), "losses": training.losses}
    pairs = zip(row["unisono"]["losses"], row["nccl"]["losses"], strict=True)
    row["apart"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return row


def groups_of(ranks: int, rank: int) -> dict[str, dict[str, Any]]:
    """By backend: the group of all ranks, and on 4 ranks or more those of the two axes of HSDP."""
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        found[way] = {"all": dist.group.WORLD if way == "unisono" else dist.new_group(backend=way)}
        if ranks >= 4:
            half = ranks // 2
            replicas = [dist.new_group([k, k + half], backend=way) for k in range(half)]
            shards = [dist.new_group(list(range(k * half, (k + 1) * half)), backend=way) for k in range(2)]
            found[way]["axes"] = [replicas[rank % half], shards[rank // half]]
    return found


def main() -> None:
    """Measure, print a table, write the numbers as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="by comma")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "training_steps_new.json")
    arguments = parser.parse_args()
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("unisono")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups, kinds = groups_of(ranks, rank), ("DDP", "FSDP2", "TP", *(["HSDP"] if ranks >= 4 else []))
    machine, rows = vars(this_machine(gpu=describe_gpus(ranks))), []
    if rank == 0:
        print(f"# {machine['gpu']}; {arguments.steps} steps, median after {WARM_UP}\n")
        print("| model | | unisono, ms | NCCL, ms | NCCL / unisono | losses apart | first and last loss |")
        print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    shown: Callable[[dict[str, Any]], str] = lambda row: (  # noqa: E731
        f"| {row['model']} | {row['kind']} | {row['unisono']['ms']:.2f} | {row['nccl']['ms']:.2f} | "
        f"{row['nccl']['ms'] / row['unisono']['ms']:.3f} | {row['apart']:.1e} | "
        f"{row['unisono']['losses'][0]:.3f}, {row['unisono']['losses'][-1]:.3f} |"
    )
    for name in arguments.models.split(","):
        for kind in kinds:
            rows.append(compared(name, kind, groups, arguments.steps))
            if rank == 0:
                print(shown(rows[-1]), flush=True)
                arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
