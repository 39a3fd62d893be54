"""A model small enough to train in milliseconds, its data, and the same training in one process to compare with.

Everything is float64: what a sum over ranks may change by its order is 1e-15, so the tests can ask for 1e-10.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FEATURES, HIDDEN, CLASSES = 8, 12, 4
BATCH = 24  # divides by 2, 3 and 4 ranks, and each share by 2
STEPS = 4

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Named = dict[str, Tensor]


def make_model() -> nn.Sequential:
    """Three linear layers, the same on every call; [N, FEATURES] -> [N, CLASSES], float64."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, CLASSES)).double()


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs [size, FEATURES] and targets [size, CLASSES] of one step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(size, CLASSES, generator=generator, dtype=torch.float64)


def my_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """One rank's even share of the batch."""
    inputs, targets = batch(step)
    return inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass
class Training:
    """What a training run leaves: the loss of every step, the last step's gradients, the final parameters."""

    losses: list[float]
    gradients: Named
    parameters: Named


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor or DTensor, detached from everything."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def training(model: nn.Module, losses: list[float]) -> Training:
    """Collect the values of a model that has just done its last optimizer step."""
    named = list(model.named_parameters())
    gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}
    return Training(losses, gradients, {name: whole(p) for name, p in named})


def train_alone(make_optimizer: MakeOptimizer = sgd, steps: int = STEPS, clip: float | None = None) -> Training:
    """Train on the whole batch in one process."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return training(model, losses)


def assert_same_named(actual: Named, expected: Named, rtol: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_training(of_ranks: list[Training], expected: Training, rtol: float = 1e-10) -> None:
    """Every rank has the gradients and parameters of one process; the mean of the ranks' losses is its loss."""
    for result in of_ranks:
        assert_same_named(result.gradients, expected.gradients, rtol)
        assert_same_named(result.parameters, expected.parameters, rtol)
    losses = torch.tensor([result.losses for result in of_ranks], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected.losses, dtype=torch.float64), rtol=rtol, atol=rtol)
