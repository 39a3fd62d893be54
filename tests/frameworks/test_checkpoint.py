"""torch's distributed checkpoint: what some ranks save, other ranks and one process load unchanged."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small import Named, adam, assert_same_named, batch, make_model, my_batch, train_alone, training
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranks import ranks

STEPS_BEFORE, STEPS_AFTER = 2, 2  # together small.STEPS


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, chosen: range, rank: int, world_size: int) -> None:
    for step in chosen:
        inputs, targets = my_batch(step, rank, world_size)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def sharded(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(make_model(), mesh=mesh)
    return model, adam(model.parameters())


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": STEPS_BEFORE}


def train_and_save(rank: int, world_size: int, directory: str, in_background: bool) -> None:
    model, optimizer = sharded(init_device_mesh("cpu", (world_size,)))
    steps(model, optimizer, range(STEPS_BEFORE), rank, world_size)
    state = checkpoint(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        if in_background:
            dcp.async_save(state, checkpoint_id=directory).result()
        else:
            dcp.save(state, checkpoint_id=directory)


def load_and_train(rank: int, world_size: int, directory: str) -> Named:
    model, optimizer = sharded(init_device_mesh("cpu", (world_size,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = checkpoint(model, optimizer) | {"step": 0}
    dcp.load(state, checkpoint_id=directory)
    assert state["step"] == STEPS_BEFORE
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps(model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER), rank, world_size)
    return training(model, []).parameters


@pytest.mark.parametrize("saved_by", [4, 3])
def test_training_goes_on_with_other_ranks(saved_by: int, tmp_path: Path) -> None:
    ranks(saved_by).run(train_and_save, str(tmp_path), False)
    expected = train_alone(adam).parameters
    for parameters in ranks(2).run(load_and_train, str(tmp_path)):
        assert_same_named(parameters, expected, 1e-8)


@pytest.mark.parametrize("in_background", [False, True])
def test_one_process_reads_what_ranks_saved(in_background: bool, tmp_path: Path) -> None:
    ranks(2).run(train_and_save, str(tmp_path / "sharded"), in_background)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "whole")
    saved = torch.load(tmp_path / "whole", weights_only=False)
    assert saved["step"] == STEPS_BEFORE
    assert_same_named(saved["model"], train_alone(adam, steps=STEPS_BEFORE).parameters, 1e-8)


def save_placed(rank: int, world_size: int, directory: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    dcp.save({"x": distribute_tensor(batch(0)[0], mesh, [Shard(0), Shard(1)]), "rank": rank}, checkpoint_id=directory)


def load_placed(rank: int, world_size: int, directory: str) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"x": distribute_tensor(torch.zeros_like(batch(0)[0]), mesh, [Shard(1)])}
    dcp.load(state, checkpoint_id=directory)
    return state["x"].redistribute(mesh, [Replicate()]).to_local()


def test_resharding_across_both_dims(tmp_path: Path) -> None:
    ranks(4).run(save_placed, str(tmp_path))
    for x in ranks(3).run(load_placed, str(tmp_path)):
        assert torch.equal(x, batch(0)[0])
