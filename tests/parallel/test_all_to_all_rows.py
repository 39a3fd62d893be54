"""all_to_all of rows whose numbers are a tensor: values, gradients, what does not fit; on CPUs."""

import pytest
import torch
from torch import Tensor

from gpu.test_row_text import wanted
from parallel.refused import refused
from ranks import ranks
from unisono.parallel.expert import all_to_all_rows

COUNTS = [[2, 0, 3], [1, 4, 0], [0, 0, 5]]


def rows_of(rank: int, rows: int) -> Tensor:
    return torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def there_and_back(rank: int, world_size: int, capacity: int, rows: list[int]) -> None:
    """Rows and gradients against what all ranks' tensors at hand say."""
    counts = [row[:world_size] for row in COUNTS[:world_size]]
    xs = [rows_of(peer, rows[peer]) for peer in range(world_size)]
    x = xs[rank].clone().requires_grad_()
    out, received = all_to_all_rows(x, torch.tensor(counts[rank]), capacity)
    assert received.tolist() == [row[rank] for row in counts]
    torch.testing.assert_close(out, wanted(xs, counts, [capacity] * world_size)[rank])

    ys = [rows_of(10 + peer, capacity) for peer in range(world_size)]
    back = wanted(ys, [[row[r] for row in counts] for r in range(world_size)], rows[:world_size])[rank]
    (gradient,) = torch.autograd.grad((out * ys[rank]).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, back)

    again, sent = all_to_all_rows(ys[rank], received, rows[rank])
    torch.testing.assert_close(again, back)
    assert sent.tolist() == counts[rank]


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_rows_and_gradients(backend: str) -> None:
    ranks(3, backend=backend).run(there_and_back, 9, [5, 6, 5])


def test_rows_that_do_not_fit_are_dropped_and_missing_ones_are_zeros() -> None:
    ranks(3).run(there_and_back, 4, [4, 7, 5])
    ranks(1).run(there_and_back, 3, [1])


def second_derivative(rank: int, world_size: int) -> None:
    x = rows_of(rank, 4).requires_grad_()
    out, _ = all_to_all_rows(x, torch.tensor([2, 2]), 4)
    (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x)


def test_twice_differentiable() -> None:
    ranks(2).run(second_derivative)


def refusals(rank: int, world_size: int) -> list[str]:
    x = torch.zeros(3, 2)
    return refused(
        [
            lambda: all_to_all_rows(x, torch.tensor([1]), 3),
            lambda: all_to_all_rows(x, torch.tensor([1, 1], dtype=torch.int32), 3),
            lambda: all_to_all_rows(x, torch.tensor([1, 1]), -1),
            lambda: all_to_all_rows(torch.tensor(1.0), torch.tensor([1, 1]), 3),
            lambda: all_to_all_rows(x, torch.tensor([1, -1]), 3),
        ]
    )


def test_what_does_not_fit_is_refused() -> None:
    first, second = ranks(2).run(refusals)
    assert first[0] == "counts must be int64 [2], a number per rank, not torch.int64 [1]"
    assert first[1] == "counts must be int64 [2], a number per rank, not torch.int32 [2]"
    assert first[2] == "capacity = -1: must be the number of rows of the output, 0 or more"
    assert "x must be [rows, ...] on the device of counts, cpu: [] on cpu" in first[3]
    assert second[4] == "counts [1, -1] on rank 1: none may be negative"
