"""The functions between whole and split tensors: values, gradients, gradients of gradients, uneven lengths."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel.refused import refused
from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.shards import Split, split_evenly
from unisono.parallel.tensor import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
    sum_gradients,
)

BACKENDS = ["unisono", "gloo"]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def every_region(rank: int, world_size: int, shape: list[int], dim: int, lengths: list[int] | None) -> None:
    """Each function against what it is defined to be, from all ranks' tensors at hand on every rank."""
    lengths = lengths or list(split_evenly(shape[dim], world_size))
    wholes = [numbers(*shape, seed=peer).requires_grad_() for peer in range(world_size)]
    parts = [
        torch.split(numbers(*shape, seed=9), lengths, dim)[peer].clone().requires_grad_() for peer in range(world_size)
    ]
    weights = [numbers(*shape, seed=50 + peer) for peer in range(world_size)]  # what each rank does with a whole result
    mine = torch.split(weights[0], lengths, dim)[rank]  # and with its part of one

    (copy_to_region(wholes[0]) * weights[rank]).sum().backward()
    check(wholes[0].grad, sum(weights))

    total = reduce_from_region(wholes[rank])
    check(total, sum(wholes))
    (gradient,) = torch.autograd.grad((total * weights[0]).sum(), wholes[rank])
    check(gradient, weights[0])

    part = scatter_to_region(wholes[0], dim, lengths=lengths)
    check(part, torch.split(wholes[0], lengths, dim)[rank])
    (gradient,) = torch.autograd.grad((part * mine).sum(), wholes[0])
    check(gradient, weights[0])

    for known in (lengths, None):
        whole = gather_from_region(parts[rank], dim, lengths=known)
        check(whole, torch.cat(parts, dim))
        (gradient,) = torch.autograd.grad((whole * weights[0]).sum(), parts[rank])
        check(gradient, mine)

        whole = all_gather_to_region(parts[rank], dim, lengths=known)
        check(whole, torch.cat(parts, dim))
        (gradient,) = torch.autograd.grad((whole * weights[rank]).sum(), parts[rank])
        check(gradient, torch.split(sum(weights), lengths, dim)[rank])

    part = reduce_scatter_from_region(wholes[rank], dim, lengths=lengths)
    check(part, torch.split(sum(wholes), lengths, dim)[rank])
    (gradient,) = torch.autograd.grad((part * mine).sum(), wholes[rank])
    check(gradient, weights[0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], int, list[int] | None]:
    world_size = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    lengths = draw(st.none() | st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size))
    if lengths is not None:
        shape[dim] = sum(lengths)
    return world_size, shape, dim, lengths


@settings(max_examples=15)
@given(cases())
def test_values_and_gradients(case: tuple[int, list[int], int, list[int] | None]) -> None:
    world_size, *arguments = case
    ranks(world_size).run(every_region, *arguments)


def test_values_and_gradients_on_gloo() -> None:
    ranks(3, backend="gloo").run(every_region, [2, 7, 3], 1, None)
    ranks(3, backend="gloo").run(every_region, [2, 4, 3], -2, [0, 3, 1])


def second_derivatives(rank: int, world_size: int) -> tuple[float, float]:
    """d²/dx² of (sum over ranks of r·x)³ and of (x gathered)³, at x = 2 on every rank."""
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    through_sum = reduce_from_region(copy_to_region(x) * (rank + 1)) ** 3
    through_gather = all_gather_to_region(x, 0).sum() ** 3 / world_size
    answers = []
    for y in (through_sum, through_gather):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        answers.append(second.item())
    return tuple(answers)


def test_twice_differentiable() -> None:
    """s = 1 + 2: 6 s³ x; of the mean of (x₀ + x₁)³ over both ranks by a rank's x, then summed: 2 · 6 (x₀ + x₁)."""
    assert ranks(2).run(second_derivatives) == [(6 * 27 * 2.0, 2 * 6 * 4.0)] * 2


def refusals(rank: int, world_size: int) -> list[str]:
    x = torch.zeros(4, 3 if rank else 2)
    attempts = [
        lambda: gather_from_region(x, 0),
        lambda: gather_from_region(x, 0, lengths=[3, 3]),
        lambda: gather_from_region(x, 0, lengths=[4]),
        lambda: scatter_to_region(torch.zeros(4), 0, lengths=[1, 2]),
    ]
    return refused(attempts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend: str) -> None:
    first, second = ranks(2, backend=backend).run(refusals)
    assert first[0] == second[0]
    assert "may differ in dim 0 only, but here are rank 0: [4, 2], rank 1: [4, 3]" in first[0]
    assert "rank 0 holds 4 elements of dim 0, but lengths [3, 3] say 3" in first[1]
    assert "lengths [4] are 1, but the group has 2 ranks" in first[2]
    assert "lengths [1, 2] add up to 3, but dim 0 of [4] has 4 elements" in first[3]


def from_outside(rank: int, world_size: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return str(copy_to_region(torch.ones(1), group).item())
    with pytest.raises(UsageError) as error:
        scatter_to_region(torch.ones(2), 0, group)
    return str(error.value)


def test_a_rank_outside_the_group_is_told() -> None:
    assert ranks(2).run(from_outside) == [
        "1.0",
        "rank 1 is not in the group [0]: pass the group of which this rank is a member",
    ]


def norm_on_parts(rank: int, world_size: int) -> Tensor:
    """The gradient of a norm's weight, each rank applying it to its part of the sequence."""
    norm = sum_gradients(nn.RMSNorm(3, dtype=torch.float64))
    norm(numbers(5, 3, seed=1).tensor_split(world_size)[rank]).pow(3).sum().backward()
    return norm.weight.grad


def test_sum_gradients() -> None:
    norm = nn.RMSNorm(3, dtype=torch.float64)
    norm(numbers(5, 3, seed=1)).pow(3).sum().backward()
    for gradient in ranks(2).run(norm_on_parts):
        check(gradient, norm.weight.grad)


@given(st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=30)
def test_split_evenly_is_tensor_split(total: int, world_size: int) -> None:
    assert split_evenly(total, world_size) == tuple(len(part) for part in torch.arange(total).tensor_split(world_size))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1))
@settings(max_examples=20)
def test_shares_join_to_the_whole(world_size: int, parts: int, each: int, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = parts * each
    whole, split = numbers(*shape, seed=0), Split(dim, parts * each, world_size, parts)
    shares = [split.take(whole, rank) for rank in range(world_size)]
    assert torch.equal(split.join(shares), whole)
    assert sum(share.numel() for share in shares) == whole.numel()
