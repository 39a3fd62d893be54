"""The two halves of a backward against the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.parallel.pipeline.backward import input_gradient

WIDTH = 4


class Everything(nn.Module):
    """Weights used once and twice, directly and through other weights, in branches and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.twice(x)) + self.bias
        x = torch.tanh(self.twice(x)) * self.bias
        x = self.normed(self.norm(x))
        x = self.normed(x) + (self.scale * self.scale).sum() * self.scale
        x = x + self.attention(x, x, x)[0]
        return self.norm(x) + x


class Nested(nn.Module):
    """Weights that a node off the way takes together with what was made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.scale, self.gain = (nn.Parameter(torch.randn(s)) for s in ((WIDTH, WIDTH), WIDTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.square.t()
        x = x @ turned @ turned * (3 * turned).sum()
        x = torch.addcmul(x, self.scale, self.scale.exp())
        return self.linear(nn.functional.layer_norm(x, (WIDTH,), self.gain, self.gain / 2))


class Hooked(nn.Module):
    """Hooks on weights that are used once, twice, and behind a view."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.linear = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: 3 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.linear(self.once(self.twice(x))))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(3, 5, 1), nn.BatchNorm1d(5), nn.ReLU(), nn.Conv1d(5, 3, 1), nn.GELU())


def both(make: type[nn.Module], x: Tensor) -> tuple[nn.Module, Tensor, nn.Module, Tensor]:
    torch.manual_seed(0)
    mine = make()
    torch.manual_seed(0)
    return mine, x.clone().requires_grad_(), make(), x.clone().requires_grad_()


@pytest.mark.parametrize("make", [Everything, Nested, Hooked, Convolutions])
def test_the_halves_make_the_whole(make: type[nn.Module]) -> None:
    x, gradient = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    mine, source, whole, other = both(make, x)
    found, later = input_gradient(mine(source), gradient, source)
    assert all(p.grad is None for p in mine.parameters())
    assert source.grad is None
    whole(other).backward(gradient)
    torch.testing.assert_close(found, other.grad)
    later.accumulate()
    for (name, got), want in zip(mine.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)
    found, later = input_gradient(mine(source), gradient, source)
    later.accumulate()
    for (name, got), want in zip(mine.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, None if want.grad is None else 2 * want.grad, msg=name)


class Scale(torch.autograd.Function):
    """x times w; counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Scale.backwards += 1
        x, w = ctx.saved_tensors
        return (gradient * w).sum_to_size(x.shape), (gradient * x).sum_to_size(w.shape)


def both_ways(x: Tensor, w: Tensor) -> Tensor:
    third = w * 3
    return (x + third) * third * (third * 2 + w)


def in_python_twice(x: Tensor, w: Tensor) -> Tensor:
    scale = Scale.apply(w, w)
    return Scale.apply(Scale.apply(x, scale), scale * 2)


WEIGHT_USED = {
    "directly and through another": (lambda x, w: (x + w) * w * (w * 2), 0),
    "through one that is used twice": (both_ways, 0),
    "through one and beside it": (lambda x, w: torch.sin(x * w.exp()) * w.exp() + x * w, 0),
    "by a node in Python and beside it": (lambda x, w: Scale.apply(torch.tanh(x + w), w) * w.exp(), 1),
    "behind nodes in Python": (in_python_twice, 3),
    "through a node in Python by one that is not": (lambda x, w: torch.tanh(x) * Scale.apply(w, w), 1),
    "before a node in Python that ends the stage": (lambda x, w: Scale.apply(w, torch.tanh(x * w)), 1),
}


@pytest.mark.parametrize(("stage", "in_python"), WEIGHT_USED.values(), ids=WEIGHT_USED)
def test_each_use_of_a_weight_counts_once(stage: Callable[[Tensor, Tensor], Tensor], in_python: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    gradient = torch.randn(2, 3, WIDTH)
    wanted = torch.autograd.grad(stage(x, w), (x, w), gradient)
    Scale.backwards = 0
    found, later = input_gradient(stage(x, w), gradient, x)
    later.accumulate()
    torch.testing.assert_close((found, w.grad), wanted)
    assert Scale.backwards == in_python


def test_a_loss_needs_no_gradient_and_hooks_run_once() -> None:
    layer, source = nn.Linear(WIDTH, 1), torch.ones(3, WIDTH, requires_grad=True)
    calls: list[str] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append("weight"))
    found, later = input_gradient(layer(source).sum(), None, source)
    assert calls == []
    later.accumulate()
    assert calls == ["weight"]
    torch.testing.assert_close(found, layer.weight.expand(3, WIDTH))
    torch.testing.assert_close(layer.weight.grad, torch.full((1, WIDTH), 3.0))


def test_without_a_way_to_the_source_everything_is_left_for_later() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    for source in (None, torch.ones(2, WIDTH), torch.ones(2, WIDTH, requires_grad=True)):
        layer.zero_grad()
        found, later = input_gradient(layer(torch.ones(2, WIDTH)), torch.ones(2, WIDTH), source)
        assert found is None
        assert layer.weight.grad is None
        later.accumulate()
        torch.testing.assert_close(layer.weight.grad, torch.full((WIDTH, WIDTH), 2.0))
    found, later = input_gradient(torch.ones(()), None, None)
    later.accumulate()
    assert found is None


def test_built_in_layers_compute_each_gradient_once() -> None:
    """Matrix products in a trace: those of inputs in the first half, those of weights in the second."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    source = torch.ones(2, WIDTH, requires_grad=True)
    output = layers(source)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as first:
        _, later = input_gradient(output, torch.ones(2, WIDTH), source)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as second:
        later.accumulate()
    assert [sum(e.count for e in t.key_averages() if e.key == "aten::mm") for t in (first, second)] == [2, 2]
