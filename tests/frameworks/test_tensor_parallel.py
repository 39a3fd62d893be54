"""DTensor and torch's tensor parallel styles give the values of one process."""

import itertools

import pytest
import torch
from small import STEPS, Training, assert_same_training, batch, make_model, my_batch, sgd, train_alone, training, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ranks import ranks

TARGETS = (Replicate(), Shard(0), Shard(1))
SOURCES = (*TARGETS, Partial("sum"))


def full() -> Tensor:
    """A matrix that divides evenly over no mesh: [7, 5]."""
    return torch.arange(35, dtype=torch.float64).reshape(7, 5)


def place(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """`full()` on the mesh; a Partial axis holds it on index 0 and zeros elsewhere."""
    spread = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(full(), mesh, spread).to_local()
    for axis, placement in enumerate(placements):
        if placement.is_partial() and mesh.get_local_rank(axis) > 0:
            local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, placements, shape=(7, 5), stride=(5, 1))


def redistribute_all(rank: int, world_size: int, shape: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", shape)
    done = 0
    for source in itertools.product(SOURCES, repeat=len(shape)):
        for target in itertools.product(TARGETS, repeat=len(shape)):
            moved = place(mesh, source).redistribute(mesh, target)
            assert moved.placements == target
            expected = distribute_tensor(full(), mesh, target, src_data_rank=None).to_local()
            torch.testing.assert_close(moved.to_local(), expected, rtol=0, atol=0)
            torch.testing.assert_close(moved.full_tensor(), full(), rtol=0, atol=0)
            done += 1
    return done


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_redistribute_between_all_placements(shape: tuple[int, ...]) -> None:
    world_size = torch.Size(shape).numel()
    assert ranks(world_size).run(redistribute_all, shape) == [12 ** len(shape)] * world_size


def matmul_all(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients through a product of DTensors, by how its factors are placed."""
    mesh = init_device_mesh("cpu", (world_size,))
    gradients = {}
    for left, right in itertools.product(TARGETS, repeat=2):
        a = distribute_tensor(full(), mesh, [left]).requires_grad_()
        b = distribute_tensor(full().T.contiguous(), mesh, [right]).requires_grad_()
        (a @ b).pow(2).sum().backward()
        gradients[f"{left} {right} a"], gradients[f"{left} {right} b"] = whole(a.grad), whole(b.grad)
    return gradients


def test_gradients_of_a_distributed_product() -> None:
    a, b = full().requires_grad_(), full().T.contiguous().requires_grad_()
    (a @ b).pow(2).sum().backward()
    for gradients in ranks(3).run(matmul_all):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, a.grad if name.endswith("a") else b.grad, rtol=1e-12, atol=0)


def tensor_parallel(mesh: DeviceMesh) -> nn.Sequential:
    """The three linear layers split by column, by row, by column."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(make_model(), mesh, plan)


def train_on(model: nn.Module, share: tuple[int, int]) -> Training:
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        inputs, targets = my_batch(step, *share)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return training(model, losses)


def train_tensor_parallel(rank: int, world_size: int) -> Training:
    model = tensor_parallel(init_device_mesh("cpu", (world_size,)))
    assert model[0].weight.to_local().shape[0] < model[0].weight.shape[0], "nothing is split"
    return train_on(model, (0, 1))


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel(world_size: int) -> None:
    assert_same_training(ranks(world_size).run(train_tensor_parallel), train_alone())


def train_two_dimensional(rank: int, world_size: int) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = fully_shard(tensor_parallel(mesh["tensor"]), mesh=mesh["data"])
    return train_on(model, (mesh["data"].get_local_rank(), 2))


def test_tensor_parallel_inside_fsdp2() -> None:
    assert_same_training(ranks(4).run(train_two_dimensional), train_alone())


class Block(nn.Module):
    """A transformer's feed-forward half: norm, up, activation, down, residual; [1, sequence, 8] float64."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_block() -> Block:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Block().double()


def block_gradients(block: Block, x: Tensor) -> dict[str, Tensor]:
    (whole_output := block(x)).pow(2).mean().backward()
    values = {name: whole(p.grad) for name, p in block.named_parameters()}
    return {**values, "input": whole(x.grad), "output": whole(whole_output)}


def sequence_input() -> Tensor:
    return batch(0)[0].unsqueeze(0)  # [1, 24, 8]


def run_sequence_parallel(rank: int, world_size: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    block = parallelize_module(
        make_block(),
        mesh,
        {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    return block_gradients(block, distribute_tensor(sequence_input(), mesh, [Shard(1)]).requires_grad_())


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel(world_size: int) -> None:
    expected = block_gradients(make_block(), sequence_input().requires_grad_())
    for values in ranks(world_size).run(run_sequence_parallel):
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)


def labels() -> Tensor:
    return torch.arange(24) % 10


def cross_entropy(classifier: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(classifier(batch(0)[0]), labels())


def make_classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 10)).double()


def run_loss_parallel(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    columns = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    classifier = parallelize_module(make_classifier(), mesh, {"0": columns})
    with loss_parallel():
        loss = cross_entropy(classifier)
        loss.backward()
    return whole(loss), whole(classifier[0].weight.grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_loss_parallel(world_size: int) -> None:
    classifier = make_classifier()
    loss = cross_entropy(classifier)
    loss.backward()
    for actual in ranks(world_size).run(run_loss_parallel):
        torch.testing.assert_close(actual, (loss.detach(), classifier[0].weight.grad), rtol=1e-10, atol=1e-12)
