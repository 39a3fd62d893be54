"""Optimizer states, gradients and parameters sharded by torch itself: weights and sizes against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel.models import mlp, rows
from ranks import ranks
from unisono.parallel.data import DistributedDataParallel

BACKENDS = ("unisono", "gloo")
STAGES = (1, 2, 3)


def build(stage: int, world_size: int, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model and its optimizer: states (ZeRO-1), gradients too (ZeRO-2), parameters too (ZeRO-3) are sharded."""
    net = mlp(seed)
    if stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported: in the ranks, not in pytest

        model = DistributedDataParallel(net)
        return model, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(net, mesh=mesh, reshard_after_forward=stage == 3)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, steps: range, rank: int = 0, world_size: int = 1) -> None:
    """Some steps on this rank's share of the 6 rows of each, clipped."""
    for step in steps:
        optimizer.zero_grad()
        share = rows(6, seed=step).chunk(world_size)[rank]
        model(share).pow(2).sum(-1).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def reference(steps: range) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, optimizer, steps)
    return net, optimizer


def near(got: nn.Module, wanted: nn.Module) -> None:
    for mine, other in zip(got.parameters(), wanted.parameters(), strict=True):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def held(tensors: Any) -> int:
    """Elements on this rank."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors if isinstance(t, Tensor))


def on_ranks_stage(rank: int, world_size: int, stage: int) -> tuple[int, int, int]:
    """Train; elements of parameters, gradients and the two moments that this rank keeps between steps."""
    model, optimizer = build(stage, world_size)
    train(model, optimizer, range(3), rank, world_size)
    near(model, reference(range(3))[0])
    states = (optimizer.optim if stage == 1 else optimizer).state.values()
    moments = [value for state in states for name, value in state.items() if name != "step"]
    return (held(model.parameters()), held(weight.grad for weight in model.parameters()), held(moments))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_own_is_one_process_cut_over_the_ranks(stage: int, backend: str) -> None:
    found = ranks(2, backend=backend).run(on_ranks_stage, stage)
    total = sum(weight.numel() for weight in mlp().parameters())
    assert sum(moments for *_, moments in found) == 2 * total
    whole = [1 if stage > 1 else 2] * 2
    assert [sum(column) // total for column in list(zip(*found, strict=True))[:2]] == whole


def on_ranks_save(rank: int, world_size: int, folder: Path, stage: int) -> None:
    model, optimizer = build(stage, world_size)
    train(model, optimizer, range(3), rank, world_size)
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": states}, checkpoint_id=str(folder))


def on_ranks_load(rank: int, world_size: int, folder: Path, stage: int) -> None:
    """Go on with another number of ranks, as if nothing had happened."""
    model, optimizer = build(stage, world_size, seed=7)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    alone, one = reference(range(3))
    near(model, alone)
    train(model, optimizer, range(3, 5), rank, world_size)
    train(alone, one, range(3, 5))
    near(model, alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_checkpoint_of_two_ranks_loads_on_three(backend: str, stage: int, tmp_path: Path) -> None:
    ranks(2, backend=backend).run(on_ranks_save, tmp_path, stage)
    ranks(3, backend=backend).run(on_ranks_load, tmp_path, stage)
