"""Cross-entropy over split logits is torch's over whole ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.refused import refused
from ranks import ranks
from unisono.parallel.tensor import gather_from_region, parallel_cross_entropy, split_evenly


def compare(rank: int, world_size: int, logits: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    """Loss and gradient of the whole logits against torch's."""
    vocabulary = logits.shape[-1]
    lengths = split_evenly(vocabulary, world_size)
    alone = logits.clone().requires_grad_()
    share = torch.split(logits, lengths, -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(share, target, vocabulary, **options)
    expected = F.cross_entropy(alone.flatten(0, -2).double(), target.flatten(), **options)
    if options.get("reduction") == "none":
        expected = expected.view(target.shape)
    exact = logits.dtype == torch.float64
    tolerance = {"rtol": 1e-11, "atol": 1e-11} if exact else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(loss, expected.to(loss.dtype), equal_nan=True, **tolerance)
    loss.sum().backward()
    expected.sum().backward()
    assert share.grad.dtype == logits.dtype
    whole = gather_from_region(share.grad, -1, lengths=lengths)
    torch.testing.assert_close(whole, alone.grad, equal_nan=True, **tolerance)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Tensor, Tensor, dict[str, Any]]:
    world_size = draw(st.integers(1, 4))
    vocabulary = draw(st.integers(world_size, 9))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64) * draw(
        st.sampled_from([1.0, 1e4])
    )
    target = torch.randint(vocabulary, shape, generator=generator)
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "ignore_index": draw(st.sampled_from([-100, int(target.flatten()[0])])),
    }
    return world_size, logits, target, options


@settings(max_examples=25)
@given(cases())
def test_equals_torch(case: tuple[int, Tensor, Tensor, dict[str, Any]]) -> None:
    world_size, *arguments = case
    ranks(world_size).run(compare, *arguments)


def test_equals_torch_on_gloo() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([[0, 6, 3, -100, 2], [5, 5, 1, 4, -100]])
    ranks(3, backend="gloo").run(compare, logits, target, {"label_smoothing": 0.2})


def test_low_precision_is_computed_in_float32() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    ranks(2).run(compare, logits, torch.tensor([0, 7, 4]), {})


def test_all_ignored_is_nan_as_in_torch() -> None:
    ranks(2).run(compare, torch.zeros(2, 4, dtype=torch.float64), torch.full((2,), -100), {})


def huge(rank: int, world_size: int) -> tuple[float, list[float]]:
    """Logits whose exponentials overflow, and some of minus infinity."""
    whole = torch.tensor([[1000.0, 999.0, -1000.0, -torch.inf]])
    share = torch.split(whole, split_evenly(4, world_size), -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(share, torch.tensor([1]), 4)
    loss.backward()
    return loss.item(), share.grad[0].tolist()


def test_is_stable() -> None:
    of_ranks = ranks(2).run(huge)
    assert [loss for loss, _ in of_ranks] == pytest.approx([1.3132616] * 2)
    assert of_ranks[0][1] + of_ranks[1][1] == pytest.approx([0.7310586, -0.7310586, 0.0, 0.0])


def refusals(rank: int, world_size: int) -> list[str]:
    logits = torch.zeros(2, 3)
    good = torch.tensor([0, 5])
    attempts = [
        lambda: parallel_cross_entropy(logits, torch.tensor([0, 6]), 6),
        lambda: parallel_cross_entropy(logits, torch.tensor([-1, 0]), 6),
        lambda: parallel_cross_entropy(logits, good, 8),
        lambda: parallel_cross_entropy(logits, torch.tensor([0]), 6),
        lambda: parallel_cross_entropy(logits, good.float(), 6),
        lambda: parallel_cross_entropy(logits, good, 6, reduction="avg"),
        lambda: parallel_cross_entropy(logits, good, 6, label_smoothing=1.5),
    ]
    return refused(attempts)


def test_what_is_refused() -> None:
    first, second = ranks(2).run(refusals)
    assert first == second
    assert first[0] == ("target 6 at [1] is outside the vocabulary of 6: targets are 0 … 5, or ignore_index = -100")
    assert first[1].startswith("target -1 at [0] is outside")
    assert first[2] == "logits [2, 3] must be [..., 4], this rank's share of 8"
    assert first[3] == "target must be [2], one per row of the logits, not [1]"
    assert first[4] == "target must be integers, not torch.float32"
    assert first[5].startswith("reduction = 'avg'")
    assert first[6].startswith("label_smoothing = 1.5")
