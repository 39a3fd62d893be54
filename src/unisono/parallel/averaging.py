"""The mean over the ranks, where the backend has one and where it has not."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.torch_names import reduce_scatter_single

__all__ = ["Average"]

_WITHOUT_AVG: set[tuple[str, str, torch.dtype]] = set()  # backend, device, dtype: what has refused ReduceOp.AVG


class Average:
    """An asynchronous mean over the ranks of `group`, in place or (with `out`) scattered: this rank's part of it.

    flat: (numel,); out: (numel / world_size,) of the same dtype. With ReduceOp.AVG where the backend has it for this
    device and dtype, else SUM and a division. A backend without AVG says so before anything moves, some at once and
    some in `wait`; no rank asks with a collective of its own, so ranks that know already and ranks that do not agree.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup | None, out: Tensor | None = None) -> None:
        self.flat, self.out, self.group = flat, out, group
        self._kind = (dist.get_backend(group), flat.device.type, flat.dtype)
        if self._kind not in _WITHOUT_AVG:
            try:
                self._start(dist.ReduceOp.AVG)
            except (RuntimeError, ValueError) as error:
                self._learn(error)
        if self._kind in _WITHOUT_AVG:
            self._start(dist.ReduceOp.SUM)

    def wait(self, present: float = 1.0) -> Tensor:
        """Wait for the mean and return it. `present`: the share of the ranks that contribute, those alone count."""
        try:
            self._work.wait()
        except (RuntimeError, ValueError) as error:
            self._learn(error)
            self._start(dist.ReduceOp.SUM)
            self._work.wait()
        divisor = present * (1 if self._op == dist.ReduceOp.AVG else dist.get_world_size(self.group))
        result = self.flat if self.out is None else self.out
        return result if divisor == 1 else result.div_(divisor)

    def _start(self, op: Any) -> None:
        self._op = op
        if self.out is None:
            self._work: Any = dist.all_reduce(self.flat, op, self.group, async_op=True)
        else:
            self._work = reduce_scatter_single(self.out, self.flat, op, self.group, async_op=True)

    def _learn(self, error: Exception) -> None:
        """Remember a refusal of AVG; raise any other error again."""
        if self._op == dist.ReduceOp.SUM or isinstance(error, UnisonoError) or "AVG" not in str(error):
            raise error
        _WITHOUT_AVG.add(self._kind)
