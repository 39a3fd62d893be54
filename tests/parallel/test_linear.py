"""Linear layers split by column and row, and stacks of them: values and gradients of one process, in pieces or not."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel.refused import refused
from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.tensor import (
    ColumnParallelLinear,
    ColumnwiseMLP,
    ParallelMLP,
    RowParallelLinear,
    full_state_dict,
    gather_from_region,
    load_full_state_dict,
    scatter_to_region,
    split_evenly,
)

BACKENDS = ["unisono", "gloo"]
double = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


def linear(inputs: int, outputs: int, seed: int, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs, bias, dtype=torch.float64)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of_whole(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient, put together from the ranks' shares as the weights are."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return full_state_dict(model)


def compare(model: nn.Module, y: Tensor, x: Tensor, alone: nn.Module, y_alone: Tensor, x_alone: Tensor) -> None:
    """Output, gradient of the input and of every weight, for a loss that tells all outputs apart."""
    double(y, y_alone)
    factors = numbers(*y_alone.shape, seed=5)
    (y * factors).sum().backward()
    (y_alone * factors).sum().backward()
    double(x.grad, x_alone.grad)
    whole = gradients_of_whole(model)
    assert whole.keys() == dict(alone.named_parameters()).keys()
    for name, parameter in alone.named_parameters():
        double(whole[name], parameter.grad)


class Pair(nn.Module):
    """What a `ParallelMLP` is on one rank."""

    def __init__(self, hidden: nn.Linear, out: nn.Linear) -> None:
        super().__init__()
        self.hidden, self.out = hidden, out

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(x)))


def pair(
    rank: int, world_size: int, sizes: tuple[int, int, int], shape: tuple[int, int], bias: bool, chunks: int
) -> None:
    """Column then row, whole activations outside."""
    alone = Pair(linear(sizes[0], sizes[1], 1, bias), linear(sizes[1], sizes[2], 2, bias))
    model = ParallelMLP(alone.hidden, alone.out, chunks=chunks)
    x, x_alone = (numbers(*shape, sizes[0]).requires_grad_() for _ in range(2))
    compare(model, model(x), x, alone, alone(x_alone), x_alone)


def sequence_pair(
    rank: int, world_size: int, shape: tuple[int, ...], dim: int, lengths: list[int] | None, chunks: int
) -> None:
    """Column then row, the activations outside split along the sequence."""
    alone = Pair(linear(3, 5, 1), linear(5, 3, 2))
    model = ParallelMLP(alone.hidden, alone.out, sequence_dim=dim, chunks=chunks)
    x, x_alone = (numbers(*shape, 3).requires_grad_() for _ in range(2))
    part = scatter_to_region(x, dim, lengths=lengths)
    y = gather_from_region(model(part, lengths), dim, lengths=lengths or split_evenly(shape[dim], world_size))
    compare(model, y, x, alone, alone(x_alone), x_alone)


@settings(max_examples=15)
@given(
    st.integers(1, 4),
    st.tuples(st.integers(1, 5), st.integers(4, 9), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 5)),
    st.booleans(),
    st.integers(1, 4),
)
def test_column_then_row(
    world_size: int, sizes: tuple[int, int, int], shape: tuple[int, int], bias: bool, chunks: int
) -> None:
    ranks(world_size).run(pair, sizes, shape, bias, chunks)


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 1), st.integers(1, 3))
def test_sequence_parallel_of_any_length(world_size: int, length: int, dim: int, chunks: int) -> None:
    shape = (length, 2) if dim == 0 else (2, length)
    ranks(world_size).run(sequence_pair, shape, dim, None, chunks)
    if length >= world_size:
        lengths = [length - world_size + 1] + [1] * (world_size - 1)
        ranks(world_size).run(sequence_pair, shape, dim, lengths, chunks)


def test_on_gloo() -> None:
    group = ranks(3, backend="gloo")
    group.run(pair, (4, 7, 5), (2, 5), True, 1)
    group.run(pair, (4, 7, 5), (2, 5), True, 3)
    group.run(sequence_pair, (7, 2), 0, None, 1)
    group.run(sequence_pair, (2, 6), 1, None, 2)


def gathered(rank: int, world_size: int) -> None:
    """The textbook's MLP: every layer by column, all activations gathered."""
    alone = nn.Sequential(linear(4, 6, 1), nn.ReLU(), linear(6, 5, 2, bias=False), nn.ReLU(), linear(5, 3, 3))
    model = ColumnwiseMLP([alone[0], alone[2], alone[4]])
    x, x_alone = (numbers(2, 3, 4).requires_grad_() for _ in range(2))
    renamed = nn.ModuleDict({"layers": nn.ModuleList([alone[0], alone[2], alone[4]])})
    compare(model, model(x), x, renamed, alone(x_alone), x_alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gathered_mlp(backend: str) -> None:
    ranks(3, backend=backend).run(gathered)


def drawn_alike(rank: int, world_size: int) -> None:
    """The layers' own weights are those of nn.Linear drawn with the same seed."""
    for layer, options in ((ColumnParallelLinear, {}), (RowParallelLinear, {"scatter_input": True})):
        torch.manual_seed(7)
        drawn = layer(5, 4, **options)
        torch.manual_seed(7)
        alone = nn.Linear(5, 4)
        assert {name: value.tolist() for name, value in full_state_dict(drawn).items()} == {
            name: value.tolist() for name, value in alone.state_dict().items()
        }
    torch.testing.assert_close(drawn(torch.ones(2, 5)), alone(torch.ones(2, 5)))


def test_drawn_as_nn_linear() -> None:
    ranks(2).run(drawn_alike)


def bias_once(rank: int, world_size: int) -> list[list[float]]:
    whole = nn.Linear(2, 3)
    whole.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    whole.bias.data = torch.tensor([100.0, 200.0, 300.0])
    layer = RowParallelLinear.from_linear(whole)
    y = layer(torch.tensor([[1.0, 1.0], [2.0, 3.0]])[:, rank : rank + 1])
    y.sum().backward()
    return [*y.tolist(), layer.bias.grad.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_row_bias_is_added_once(backend: str) -> None:
    expected = [[103.0, 207.0, 311.0], [108.0, 218.0, 328.0], [2.0, 2.0, 2.0]]
    assert ranks(2, backend=backend).run(bias_once) == [expected] * 2


def frozen_and_cast(rank: int, world_size: int) -> None:
    """A frozen weight gets no gradient, and autocast multiplies in its own dtype, which the result has too."""
    whole = nn.Linear(4, 4)
    whole.weight.requires_grad_(False)
    layers = [ColumnParallelLinear.from_linear(whole), RowParallelLinear.from_linear(whole, sequence_dim=0)]
    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layers[1](layers[0](x))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert RowParallelLinear.from_linear(whole)(layers[0](x)).dtype == torch.float32
    assert layers[0].weight.grad is layers[1].weight.grad is None
    assert layers[0].bias.grad is not None
    assert x.grad.dtype == torch.float32


def test_frozen_weights_and_autocast() -> None:
    ranks(2).run(frozen_and_cast)


def save_and_load(rank: int, world_size: int) -> None:
    """Whole state in, whole state out; shares as torch's own state_dict; another shape is refused."""
    alone = Pair(linear(3, 5, 1), linear(5, 3, 2))
    model = ParallelMLP(linear(3, 5, 8), linear(5, 3, 9))
    load_full_state_dict(model, alone.state_dict())
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, alone.state_dict()[name])
    assert model.state_dict()["hidden.weight"].shape == (split_evenly(5, world_size)[rank], 3)
    with pytest.raises(UsageError, match=r"out\.weight must be whole, \[3, 5\], not \[3, 2\]"):
        load_full_state_dict(model, alone.state_dict() | {"out.weight": torch.zeros(3, 2)})
    with pytest.raises(RuntimeError, match=r"out\.bias"):
        load_full_state_dict(model, {k: v for k, v in alone.state_dict().items() if k != "out.bias"})


def test_full_state() -> None:
    ranks(2).run(save_and_load)


def refusals(rank: int, world_size: int) -> list[str]:
    attempts = [
        lambda: ColumnParallelLinear(3, 2),
        lambda: RowParallelLinear(2, 3),
        lambda: ColumnParallelLinear(3, 7, parts=3),
        lambda: ColumnParallelLinear(3, 9, parts=3, gather_output=True),
        lambda: RowParallelLinear(3, 3, chunks=0),
        lambda: ParallelMLP(nn.Linear(3, 4), nn.Linear(5, 3)),
        lambda: ColumnwiseMLP([]),
        lambda: ColumnParallelLinear(4, 6, parts=0),
        lambda: RowParallelLinear(4, 6, sequence_dim=-1),
    ]
    return refused(attempts)


def test_bad_configurations_are_one_line_on_every_rank() -> None:
    first, *others = ranks(3).run(refusals)
    assert others == [first, first]
    assert first[0].startswith("out_features of a column-parallel layer = 2 cannot be split over 3 ranks")
    assert first[1].startswith("in_features of a row-parallel layer = 2 cannot be split over 3 ranks")
    assert first[2:4] == [
        "out_features = 7 is not 3 equal parts",
        "gather_output joins one matrix's outputs, not 3 parts': leave one of them out",
    ]
    assert first[4].startswith("chunks = 0")
    assert first[5] == "layer 0 gives 4 features, but layer 1 takes 5"
    assert first[6] == "an MLP needs at least one layer"
    assert first[7] == "out_features = 6 is not 0 equal parts"
    assert first[8].startswith("sequence_dim = -1 is the dim of the features")
