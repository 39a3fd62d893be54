"""all_reduce of sparse COO tensors: everybody's entries are gathered and added up, in rank order."""

from typing import Any

import torch
from torch._C._distributed_c10d import Work

from unisono.backend.work import FinishedWork
from unisono.errors import UsageError

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(group: Any, tensor: torch.Tensor, name: str) -> Work:
    """Sums sparse COO tensors of equal shape over ``group`` (a `UnisonoProcessGroup`), in place; done on return.

    Raises `UsageError` for another reduce op (``name``) than SUM.
    """
    if name != "SUM":
        raise UsageError(f"all_reduce of a sparse tensor combines with SUM alone, not {name}; use .to_dense()")
    mine = tensor.detach().coalesce()
    size, dims = group.getSize(), mine.sparse_dim()
    counts = torch.empty(size, dtype=torch.int64, device="cpu")
    _wait(group.all_gather_single(counts, torch.tensor([mine._nnz()], device="cpu")))
    entries = [int(count) for count in counts]
    rest = mine.values().shape[1:]
    indices = [torch.empty((count, dims), dtype=torch.int64, device="cpu") for count in entries]
    values = [torch.empty((count, *rest), dtype=mine.dtype, device="cpu") for count in entries]
    _wait(group.allgather([indices], [mine.indices().t().contiguous()]))
    _wait(group.allgather([values], [mine.values()]))
    total = torch.sparse_coo_tensor(
        torch.cat(indices).t(), torch.cat(values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return FinishedWork([tensor])


def _wait(work: Work) -> None:
    work.wait()
