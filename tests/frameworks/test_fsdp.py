"""torch's fully sharded data parallel (FSDP2, its hybrid HSDP, and FSDP1) gives the values of one process."""

from collections.abc import Callable

import pytest
import torch
from small import (
    STEPS,
    Training,
    adam,
    assert_same_named,
    assert_same_training,
    make_model,
    my_batch,
    sgd,
    train_alone,
    training,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from ranks import ranks

CLIP = 0.2  # well under the norms that occur


def sharded(mesh: DeviceMesh, **options: object) -> nn.Sequential:
    """The model with each linear layer, then the rest, sharded over the mesh."""
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
    before_step: Callable[[nn.Sequential], object] = lambda model: None,
    microbatches: int = 1,
) -> Training:
    losses = []
    for step in range(STEPS):
        inputs, targets = my_batch(step, rank, world_size)
        optimizer.zero_grad()
        losses.append(0.0)
        for index, (x, y) in enumerate(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)):
            if microbatches > 1:
                model.set_requires_gradient_sync(index == microbatches - 1)
            loss = nn.functional.mse_loss(model(x).to(y.dtype), y) / microbatches
            loss.backward()
            losses[-1] += loss.item()
        before_step(model)
        optimizer.step()
    return training(model, losses)


def train_fsdp2(rank: int, world_size: int) -> dict[str, Training]:
    mesh = init_device_mesh("cpu", (world_size,))
    results = {}
    model = sharded(mesh)
    assert model[0].weight.to_local().shape[0] < model[0].weight.shape[0], "nothing is sharded"
    results["sgd"] = train(model, sgd(model.parameters()), rank, world_size)
    model = sharded(mesh)
    results["adam, accumulated"] = train(model, adam(model.parameters()), rank, world_size, microbatches=2)
    model = sharded(mesh, reshard_after_forward=False)
    results["clipped"] = train(
        model, sgd(model.parameters()), rank, world_size, lambda m: nn.utils.clip_grad_norm_(m.parameters(), CLIP)
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = sharded(mesh, mp_policy=policy)
    results["bf16"] = train(model, sgd(model.parameters()), rank, world_size)
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fsdp2(world_size: int) -> None:
    results = ranks(world_size).run(train_fsdp2)
    expected = train_alone(sgd)
    assert_same_training([result["sgd"] for result in results], expected)
    assert_same_training([result["adam, accumulated"] for result in results], train_alone(adam), 1e-8)
    clipped = train_alone(sgd, clip=CLIP)
    assert any(not torch.equal(value, expected.gradients[name]) for name, value in clipped.gradients.items())
    assert_same_training([result["clipped"] for result in results], clipped, 1e-8)
    assert_same_training([result["bf16"] for result in results], expected, 3e-2)


def train_hsdp(rank: int, world_size: int) -> tuple[Training, list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    result = train(model, adam(model.parameters()), rank, world_size)
    return result, list(model[0].weight.to_local().shape)


def test_hsdp() -> None:
    results = ranks(4).run(train_hsdp)
    assert_same_training([result for result, _ in results], train_alone(adam), 1e-8)
    assert {tuple(shape) for _, shape in results} == {(6, 8)}  # 12 rows over the 2 ranks of a shard group


def sync_late(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Two backward passes in HSDP: the first only reduce-scatters, the second all-reduces over the replicas too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        inputs, targets = my_batch(step, rank, world_size)
        nn.functional.mse_loss(model(inputs), targets).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_hsdp_all_reduces_late() -> None:
    model = make_model()
    for step in range(2):
        for rank in range(4):
            inputs, targets = my_batch(step, rank, 4)
            (nn.functional.mse_loss(model(inputs), targets) / 4).backward()
    for gradients in ranks(4).run(sync_late):
        assert_same_named(gradients, {name: p.grad for name, p in model.named_parameters()})


def train_fsdp1(rank: int, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    result = train(model, sgd(model.parameters()), rank, world_size)
    with FullyShardedDataParallel.summon_full_params(model):
        return result.losses, {name: whole(p) for name, p in model.named_parameters()}


def test_fsdp1() -> None:
    expected = train_alone(sgd)
    results = ranks(3).run(train_fsdp1)
    for _, parameters in results:
        assert_same_named(parameters, expected.parameters)
    losses = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected.losses, dtype=torch.float64))
