"""Whole jobs over hosts: the main job under two torchruns, steps of DDP and FSDP2 as with Gloo, 16 ranks on 4 hosts."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hosts.conftest import Network

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
STEPS = 3


def on_ranks(net: Network, local: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """What a function of this module returns on every rank, ``local`` of them on each host (rank.py)."""
    call = json.dumps([function.__module__, function.__name__, given])
    argv, size = [sys.executable, "-u", "-m", "hosts.rank", call], net.hosts.count * local
    running = [net.start(k // local, argv, {"RANK": f"{k}", "WORLD_SIZE": f"{size}"}) for k in range(size)]
    printed = [each.end(110.0)[1].strip().splitlines() for each in running]
    assert all(lines and lines[-1].startswith("result ") for lines in printed), printed
    return [json.loads(lines[-1].removeprefix("result ")) for lines in printed]


def test_the_main_job_under_two_torchruns(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    small = ["--steps", "12", "--width", "32", "--layers", "1", "--plot", f"{tmp_path}/curve.png"]
    both = net.on_all([*TORCHRUN, "-m", "unisono.cli", "train", *small], {"COLUMNS": "200"})
    (code, text), (other, its_text) = (each.end(110.0) for each in both)
    assert (code, other) == (0, 0), text + its_text
    assert re.search(r"4 ranks", text), text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def steps(rank: int, world_size: int, how: str) -> dict[str, list[float]]:
    """The losses of some steps with each backend; the same numbers go in."""
    found = {}
    for backend in ("unisono", "gloo"):
        group = dist.new_group(backend=backend)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        if how == "ddp":
            model = DistributedDataParallel(model, process_group=group)
        else:
            fully_shard(model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        numbers = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(STEPS):
            loss = (model(torch.randn(8, 64, generator=numbers)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        found[backend] = losses
    return found


def test_steps_of_ddp_and_of_fsdp(make_hosts: Callable[..., Network]) -> None:
    net = make_hosts()
    for how in ("ddp", "fsdp"):
        for losses in on_ranks(net, 2, steps, how):
            torch.testing.assert_close(losses["unisono"], losses["gloo"], rtol=1e-5, atol=1e-6)
            assert losses["unisono"][-1] < losses["unisono"][0]


def many(rank: int, world_size: int) -> list[str]:
    """What is wrong among many ranks: sums in rank order, small and large, a gather, messages around the ring."""
    wrong = []
    for numel in (1, 5000, 300_000):
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(each)) for each in range(world_size)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        x = parts[rank].clone()
        dist.all_reduce(x)
        wrong += [] if torch.equal(x, total) else [f"all_reduce of {numel}"]
        gathered = torch.empty(world_size * numel)
        dist.all_gather_into_tensor(gathered, parts[rank])
        wrong += [] if torch.equal(gathered, torch.cat(parts)) else [f"all_gather of {numel}"]
    came, sent = torch.empty(1), dist.isend(torch.tensor([float(rank)]), (rank + 1) % world_size)
    dist.recv(came, (rank - 1) % world_size)
    sent.wait()
    return wrong if came.item() == (rank - 1) % world_size else [*wrong, "messages"]


def test_16_ranks_on_4_hosts(make_hosts: Callable[..., Network]) -> None:
    assert on_ranks(make_hosts(4), 4, many) == [[]] * 16
