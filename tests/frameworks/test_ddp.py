"""torch's DistributedDataParallel and ZeroRedundancyOptimizer give the values of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import (
    STEPS,
    Named,
    Training,
    adam,
    assert_same_named,
    assert_same_training,
    batch,
    make_model,
    my_batch,
    sgd,
    train_alone,
    training,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ranks import ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 1e-4},
}

HOOKS = {
    "plain": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "PowerSGD": powerSGD_hook.powerSGD_hook,
}


def my_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> list[float]:
    """Train on this rank's share of every batch; return the losses."""
    losses = []
    for step in range(STEPS):
        inputs, targets = my_batch(step, rank, world_size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_variants(rank: int, world_size: int) -> dict[str, Training]:
    results = {}
    for name, options in VARIANTS.items():
        model = make_model()
        if rank:
            nn.init.zeros_(model[0].weight)  # DDP has to bring rank 0's parameters
        ddp = DistributedDataParallel(model, **options)
        results[name] = training(model, my_steps(ddp, sgd(ddp.parameters()), rank, world_size))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ddp(world_size: int) -> None:
    expected = train_alone(sgd)
    results = ranks(world_size).run(train_variants)
    for name in VARIANTS:
        assert_same_training([result[name] for result in results], expected)


def train_hooked(rank: int, world_size: int) -> dict[str, Training]:
    results = {}
    for name, hook in HOOKS.items():
        state = None
        if name == "PowerSGD":  # a matrix rank that large compresses nothing away, so that the values must agree
            state = powerSGD_hook.PowerSGDState(
                None, 64, start_powerSGD_iter=2, min_compression_rate=0.01, use_error_feedback=False
            )
        model = make_model()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, hook)
        results[name] = training(model, my_steps(ddp, sgd(ddp.parameters()), rank, world_size))
    return results


def test_ddp_communication_hooks() -> None:
    expected = train_alone(sgd)
    results = ranks(3).run(train_hooked)
    for name, rtol in {"plain": 1e-10, "fp16": 2e-3, "PowerSGD": 1e-6}.items():
        assert_same_training([result[name] for result in results], expected, rtol)


def train_accumulating(rank: int, world_size: int) -> Training:
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = sgd(ddp.parameters())
    losses = []
    for step in range(STEPS):
        inputs, targets = my_batch(step, rank, world_size)
        optimizer.zero_grad()
        with ddp.no_sync():
            x, y = inputs.chunk(2)[0], targets.chunk(2)[0]
            first = nn.functional.mse_loss(ddp(x), y) / 2
            first.backward()
        x, y = inputs.chunk(2)[1], targets.chunk(2)[1]
        second = nn.functional.mse_loss(ddp(x), y) / 2
        second.backward()
        optimizer.step()
        losses.append(first.item() + second.item())
    return training(model, losses)


def test_ddp_gradient_accumulation() -> None:
    assert_same_training(ranks(2).run(train_accumulating), train_alone(sgd))


def train_uneven(rank: int, world_size: int) -> Named:
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = sgd(ddp.parameters())
    with Join([ddp]):
        for step in range(rank + 1):  # rank r has r + 1 batches
            inputs, targets = my_batch(step, rank, world_size)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
    return training(model, []).parameters


def test_ddp_join_of_uneven_inputs() -> None:
    world_size = 3
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(world_size):
        optimizer.zero_grad()
        for rank in range(step, world_size):  # the others have run out, and count as zero in the mean
            inputs, targets = my_batch(step, rank, world_size)
            (nn.functional.mse_loss(model(inputs), targets) / world_size).backward()
        optimizer.step()
    for parameters in ranks(world_size).run(train_uneven):
        assert_same_named(parameters, training(model, []).parameters)


def buffers_after_training(rank: int, world_size: int) -> Named:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(4).double())
    ddp = DistributedDataParallel(model)
    for step in range(STEPS):
        ddp(my_batch(step, rank, world_size)[0]).sum().backward()
    ddp(my_batch(0, 0, world_size)[0])  # the forward pass brings rank 0's buffers first
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_ddp_buffers_are_rank_0s() -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(4).double())
    for step in [*range(STEPS), 0]:
        model(batch(step)[0].chunk(3)[0])
    for buffers in ranks(3).run(buffers_after_training):
        assert_same_named(buffers, dict(model.named_buffers()))


def train_zero(rank: int, world_size: int) -> tuple[Training, dict[int, Named] | None, int]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported: in the ranks, not in pytest

    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    result = training(model, my_steps(ddp, optimizer, rank, world_size))
    mine = len(optimizer.optim.state)
    optimizer.consolidate_state_dict(to=0)
    return result, optimizer.state_dict()["state"] if rank == 0 else None, mine


@pytest.mark.parametrize("world_size", [2, 4])
def test_zero_1(world_size: int) -> None:
    model = make_model()
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    results = ranks(world_size).run(train_zero)
    assert_same_training([result[0] for result in results], train_alone(adam))
    state = results[0][1]
    for index, expected in optimizer.state_dict()["state"].items():
        assert_same_named(state[index], expected)
    held = [result[2] for result in results]
    assert sum(held) == len(list(model.parameters()))
    assert max(held) < sum(held), "the optimizer state is not sharded"


def gradients_by_group(rank: int, world_size: int) -> tuple[int, Named]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=pairs[rank // 2])
    inputs, targets = my_batch(rank // 2, rank % 2, 2)
    nn.functional.mse_loss(ddp(inputs), targets).backward()
    gradients = training(model, []).gradients
    dist.destroy_process_group(pairs[rank // 2])
    return rank // 2, gradients


def test_ddp_in_two_groups_at_once() -> None:
    for pair, gradients in ranks(4).run(gradients_by_group):
        model = make_model()
        inputs, targets = batch(pair)
        nn.functional.mse_loss(model(inputs), targets).backward()
        assert_same_named(gradients, training(model, []).gradients)


def sparse_gradient(rank: int, world_size: int) -> torch.Tensor:
    embedding = nn.Embedding(6, 2, sparse=True)
    indices = [[0, 1, 1], [1, 5, 0], []][rank]
    ddp = DistributedDataParallel(embedding)
    (ddp(torch.tensor(indices, dtype=torch.int64)) * (rank + 1)).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    return embedding.weight.grad.to_dense()


def test_ddp_of_sparse_gradients() -> None:
    expected = torch.zeros(6, 2)
    expected[0], expected[1], expected[5] = 1 + 2, 2 * 1 + 2, 2
    for gradient in ranks(3).run(sparse_gradient):
        torch.testing.assert_close(gradient, expected / 3)
