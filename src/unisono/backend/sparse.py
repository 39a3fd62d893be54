"""all_reduce of sparse COO tensors: the entries of all ranks are gathered and added up, in rank order."""

from typing import Any

import torch
from torch._C._distributed_c10d import Work

from unisono.backend.operations import Operation
from unisono.backend.work import FinishedWork
from unisono.errors import UsageError
from unisono.runtime.call import Call, name_of_dtype

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(group: Any, tensor: torch.Tensor, name: str, opts: Any) -> Work:
    """Sums sparse COO tensors of equal shape over ``group`` (a `UnisonoProcessGroup`), in place; done on return.

    Raises `UsageError` for another reduce op (``name``) than SUM.
    """
    mine = _Entries(group.size())
    _wait(group._general("all_reduce", opts, lambda: mine.count(group, tensor, name)))
    rest = mine.values.shape[1:]
    counts = mine.counts.tolist()
    indices = [torch.empty((count, mine.indices.shape[0]), dtype=torch.int64, device="cpu") for count in counts]
    values = [torch.empty((count, *rest), dtype=mine.values.dtype, device="cpu") for count in counts]
    _wait(group.allgather([indices], [mine.indices.t().contiguous()]))
    _wait(group.allgather([values], [mine.values]))
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        total = torch.sparse_coo_tensor(
            torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False
        ).coalesce()
        tensor.copy_(total)
    return FinishedWork([tensor])


class _Entries:
    """This rank's entries, and how many each rank has once these have been counted."""

    def __init__(self, size: int) -> None:
        self.counts = torch.empty(size, dtype=torch.int64, device="cpu")
        self.indices: torch.Tensor
        self.values: torch.Tensor

    def count(self, group: Any, tensor: torch.Tensor, name: str) -> Operation:
        """Counts the entries of all ranks, in a call whose header describes their tensors."""
        if name != "SUM":
            raise UsageError(f"all_reduce of a sparse tensor combines with SUM alone, not {name}; use .to_dense()")
        with torch.inference_mode(tensor.is_inference()):  # torch adds such tensors up in no other mode
            whole = tensor.detach().coalesce()
            self.indices, self.values = whole.indices(), whole.values()
        dims, operations = tensor.sparse_dim(), group._group.operations
        words = f"sparse {name_of_dtype(tensor.dtype)} {list(tensor.shape)} of {dims} sparse dims"
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), name, extra_signature=words, args_text=words)
        own = torch.tensor([whole._nnz()], device="cpu")
        prepared = operations.counts(call, own.nbytes)
        return Operation(call, [(prepared, self.counts, own)], [tensor])


def _wait(work: Work) -> None:
    work.wait()
