"""Collectives fused with RMSNorm: values and gradients against one process, by torch's operations and by a kernel.

A kernel is stood in for here by what it is to give, so that the gradients that go with it run on CPUs.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.refused import refused
from ranks import ranks
from unisono.parallel.tensor import all_reduce_rms_norm, reduce_scatter_rms_norm, rms_norm, rms_norm_all_gather

HIDDEN, EPS = 6, 1e-3


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stand_in(collective: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, group: Any) -> Any:
    """What a kernel of that name gives, by collectives that are no part of any graph."""

    def kernel(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        carried = x.detach()
        if residual is not None:
            total = x.detach().clone()
            dist.all_reduce(total)
            rows = total.tensor_split(dist.get_world_size())[dist.get_rank()] if "scatter" in collective else total
            carried = residual.detach() + rows
        norm = F.rms_norm(carried, weight.shape, weight.detach(), eps)
        if "all_gather" in collective:
            parts = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, norm)
            norm = torch.cat(parts)
        return norm, carried

    return kernel


def one_process(xs: list[Tensor], residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    carried = residual + sum(xs)
    return F.rms_norm(carried, weight.shape, weight, EPS), carried


def every_form(rank: int, world_size: int, dim: int, lengths: list[int] | None, by_kernel: bool) -> None:
    """Each function, and its gradients, against one process that holds all ranks' tensors."""
    shape = [3, 2 * world_size, HIDDEN] if dim else [2 * world_size, 3, HIDDEN]
    parts_of = lengths or [2] * world_size
    kept = rms_norm._kernel
    if by_kernel:
        rms_norm._kernel = stand_in
    try:
        xs = [numbers(*shape, seed=peer).requires_grad_() for peer in range(world_size)]
        residual, weight = numbers(*shape, seed=20).requires_grad_(), numbers(HIDDEN, seed=21).requires_grad_()
        norm, carried = one_process(xs, residual, weight)
        to_norm, to_carried = numbers(*shape, seed=22), numbers(*shape, seed=23)
        grads = torch.autograd.grad((norm * to_norm).sum() + (carried * to_carried).sum(), [xs[rank], residual, weight])

        found = all_reduce_rms_norm(xs[rank], residual, weight, EPS)
        torch.testing.assert_close(found, (norm, carried))
        loss = (found[0] * to_norm).sum() + (found[1] * to_carried).sum()
        own = torch.autograd.grad(loss, [xs[rank], residual, weight], create_graph=True)
        torch.testing.assert_close(own, grads)
        torch.autograd.grad(own[1].square().sum(), residual)

        def part(tensor: Tensor) -> Tensor:
            return tensor.split(parts_of, dim)[rank]

        mine = part(residual.detach()).clone().requires_grad_()
        for gathered in (False, True):
            found = reduce_scatter_rms_norm(xs[rank], mine, weight, EPS, dim=dim, lengths=lengths, all_gather=gathered)
            torch.testing.assert_close(found, (norm if gathered else part(norm), part(carried)))
            one = found[0] * to_norm / world_size if gathered else found[0] * part(to_norm)
            own = torch.autograd.grad(one.sum() + (found[1] * part(to_carried)).sum(), [xs[rank], mine, weight])
            torch.testing.assert_close(own[:2], (grads[0], part(grads[1])))
            total = own[2].clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, grads[2])

        gathered = rms_norm_all_gather(mine, weight, EPS, dim=dim, lengths=lengths)
        whole = F.rms_norm(residual, weight.shape, weight, EPS)
        torch.testing.assert_close(gathered, whole)
        (own,) = torch.autograd.grad((gathered * to_norm / world_size).sum(), mine)
        torch.testing.assert_close(own, part(torch.autograd.grad((whole * to_norm).sum(), residual)[0]))
    finally:
        rms_norm._kernel = kept


@pytest.mark.parametrize("by_kernel", [False, True])
def test_values_and_gradients(by_kernel: bool) -> None:
    ranks(2).run(every_form, 0, None, by_kernel)
    ranks(3).run(every_form, 0, None, by_kernel)


def test_other_dims_and_lengths() -> None:
    ranks(2).run(every_form, 1, None, False)
    ranks(2).run(every_form, 0, [3, 1], False)
    ranks(2, backend="gloo").run(every_form, 1, [1, 3], False)


def in_bfloat16(rank: int, world_size: int) -> None:
    """Sums in rank order, rounded where one call after the other rounds: the residual has exactly these bits."""
    xs = [numbers(5, 64, seed=peer, dtype=torch.bfloat16) for peer in range(world_size)]
    residual, weight = numbers(5, 64, seed=9).bfloat16(), numbers(64, seed=8).bfloat16()
    total = sum(x.float() for x in xs).bfloat16()  # type: ignore[union-attr]
    norm, carried = all_reduce_rms_norm(xs[rank], residual, weight)
    assert torch.equal(carried, residual + total)
    wide = carried.float()
    by_hand = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    torch.testing.assert_close(norm.float(), by_hand, rtol=2**-8, atol=0)
    _, wider = all_reduce_rms_norm(xs[rank], residual.float(), weight.float())
    assert torch.equal(wider, residual.float() + total)


def test_bfloat16_is_rounded_once_a_step() -> None:
    ranks(3).run(in_bfloat16)


def refusals(rank: int, world_size: int) -> list[str]:
    x, weight = torch.zeros(4, HIDDEN), torch.ones(HIDDEN)
    return refused(
        [
            lambda: all_reduce_rms_norm(x, x, torch.ones(4)),
            lambda: all_reduce_rms_norm(x, x[:2], weight),
            lambda: reduce_scatter_rms_norm(x, x, weight),
            lambda: reduce_scatter_rms_norm(x, x[:2], weight, dim=-1),
            lambda: rms_norm_all_gather(x, weight, lengths=[1, 2]),
        ]
    )


def test_what_does_not_fit_is_refused() -> None:
    first, _ = ranks(2).run(refusals)
    assert first[0] == "weight must be [hidden], the last dim of x [4, 6], not [4]"
    assert first[1] == "residual must be [4, 6] for x [4, 6], not [2, 6]"
    assert first[2] == "residual must be [2, 6] for x [4, 6], not [4, 6]"
    assert first[3] == "dim = -1 of [4, 6] must be one of the sequence, not that of the hidden elements"
    assert "rank 0 holds 4 elements of dim 0" in first[4]
