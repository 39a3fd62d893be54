"""Small models and batches, the same for the ranks and for the one process they are compared with."""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """Two ways through; a call takes one of them, or both. `never` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor, ways: str) -> Tensor:
        return self.head(torch.stack([getattr(self, way)(x) for way in ways.split()]).sum(0))


class Tied(nn.Module):
    """An embedding whose weights are the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def mlp(seed: int = 0, widths: Iterable[int] = (5, 8, 6, 3)) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def rows(count: int, width: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if weight.grad is None else weight.grad.clone() for name, weight in model.named_parameters()}


def assert_close(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], scale: float = 1.0) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        mine = got[name]
        if value is None or mine is None:
            assert value is mine, name
        else:
            torch.testing.assert_close(mine, value * scale, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
