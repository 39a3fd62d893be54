"""all_reduce of sparse COO tensors: what adds up, and what is refused on all ranks before anything is read."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from contract.test_refusals import messages
from ranks import ranks


def coo(at: list[list[int]], values: list[float], shape: tuple[int, ...], **options: torch.dtype) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(at), torch.tensor(values, **options), shape, check_invariants=True)


def sums(rank: int, world_size: int) -> list[torch.Tensor]:
    """Return the sums of tensors with doubled entries, with dense dims, and with no entries but on one rank."""
    several = coo([[0, 2, 0]], [1.0, rank, 2.0], (4,))
    hybrid = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 3, dtype=torch.int64), (world_size, 3))
    lonely = coo([[1], [1]], [5.0], (2, 2)) if rank else coo([[], []], [], (2, 2))
    for tensor in (several, hybrid, lonely):
        dist.all_reduce(tensor)
    return [tensor.to_dense() for tensor in (several, hybrid, lonely)]


def that_differ(rank: int, world_size: int) -> dict[str, str]:
    """Rank 0's tensor is of another shape, dtype, number of sparse dims or layout than the others'."""
    usual = coo([[3], [1]], [1.0], (8, 2))
    odd = {
        "far outside": coo([[0], [1]], [1.0], (800_000, 2)),
        "little outside": coo([[7], [1]], [1.0], (9, 2)),
        "another row": coo([[3], [3]], [1.0], (4, 4)),
        "dtype": coo([[3], [1]], [1.0], (8, 2), dtype=torch.float64),
        "sparse dims": torch.ones(8, 2).to_sparse(1),
        "dense": torch.ones(8, 2),
    }
    given = odd if rank == 0 else {name: usual.clone() for name in odd}
    return messages({name: partial(dist.all_reduce, tensor) for name, tensor in given.items()})


def one_refused(rank: int, world_size: int) -> dict[str, str]:
    """Rank 0 asks for what a sparse tensor does not have."""
    op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
    return messages({"max": lambda: dist.all_reduce(coo([[1]], [1.0], (4,)), op)})


def test_entries_are_added_up() -> None:
    for several, hybrid, lonely in ranks(3).run(sums):
        assert several.tolist() == [9.0, 0.0, 3.0, 0.0]
        assert hybrid.tolist() == [[1, 1, 1]] * 3
        assert lonely.tolist() == [[0.0, 0.0], [0.0, 10.0]]


def test_tensors_that_differ_are_told_apart_on_all_ranks() -> None:
    seen = ranks(3).run(that_differ)
    for name in seen[0]:
        for texts in seen:
            assert texts[name].startswith("MismatchError"), f"{name}: {texts[name]}"
            assert "sparse float32 [8, 2]" in texts[name]
    assert "sparse float64 [8, 2]" in seen[1]["dtype"]
    assert "[800000, 2]" in seen[1]["far outside"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_op_that_sparse_tensors_do_not_have_is_told_to_the_peers(world_size: int) -> None:
    first, *others = (seen["max"] for seen in ranks(world_size, group_timeout=10).run(one_refused))
    assert first.startswith("UsageError")
    assert "SUM alone, not MAX" in first
    for text in others:
        assert "SUM alone, not MAX" in text
