"""Calls through torch.distributed: a group of all ranks for each of its backends, and every collective in it; and
torch's own operations on symmetric memory, those without NVLink multicast.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.bench.cases import Case
from unisono.bench.settings import PERSISTENT, Settings
from unisono.bench.values import FACTOR
from unisono.errors import UsageError
from unisono.torch_names import all_gather_single, reduce_scatter_single

__all__ = ["TorchCaller", "torch_callers"]

_TIMEOUT = timedelta(minutes=5)


class TorchCaller:
    """Makes its calls in ``group``, of all ranks; None is the default group.

    ``call`` and ``output`` are what is measured and checked. The first contender's caller also rules the walk, by
    ``barrier`` and ``all_numbers``.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def call(self, case: Case, asynchronous: bool, way: str = "") -> Callable[[], Any]:
        """A function that makes one call and is back when it is done; on GPUs, when it is on the current stream.

        ``way``: a contender's algorithm, if its backend has ways of its own for it.
        """
        if way == PERSISTENT:
            return _persistent(case, self.group, asynchronous)
        start = _call(case, self.group, asynchronous)
        if not asynchronous or case.collective == "send_recv":
            return start

        def start_and_wait() -> None:
            start().wait()

        return start_and_wait

    def output(self, case: Case) -> torch.Tensor:
        """The tensor of the result."""
        return case.output

    def barrier(self) -> None:
        """No rank is back before all have come."""
        dist.barrier(self.group)

    def all_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks, in rank order: ``[ranks * n]`` for ``[n]``."""
        found = numbers.new_empty(dist.get_world_size(self.group) * len(numbers))
        all_gather_single(found, numbers, self.group)
        return found


class SymmetricCaller(TorchCaller):
    """all_reduce by torch's operations on symmetric memory, which is mapped at the first call.

    ``group``: NCCL's, of all ranks; ``nbytes``: of the largest tensor. Inputs lie in that memory from the beginning:
    nothing is copied into it while time is taken.
    """

    def __init__(self, group: Any, nbytes: int) -> None:
        super().__init__(group)
        self._nbytes = nbytes
        self._memory: torch.Tensor | None = None
        self._found: torch.Tensor | None = None

    def call(self, case: Case, asynchronous: bool, way: str = "") -> Callable[[], Any]:
        """A function that makes one call: one_shot gives a new tensor, two_shot works in place.

        Raises UsageError for what torch lacks.
        """
        if (case.collective, case.settings.op, case.place) != ("all_reduce", "sum", "in"):
            raise UsageError("without multicast torch has only all_reduce over symmetric memory, of sums, in place")
        x, name, ops = self._symmetric(case.input), self.group.group_name, torch.ops.symm_mem
        run = ops.one_shot_all_reduce if way == "one_shot" else ops.two_shot_all_reduce_

        def call() -> None:
            self._found = run(x, "sum", name)

        return call

    def output(self, case: Case) -> torch.Tensor:
        """The result of the last call."""
        assert self._found is not None
        return self._found

    def _symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in symmetric memory."""
        import torch.distributed._symmetric_memory as symmetric

        if self._memory is None:
            self._memory = symmetric.empty(self._nbytes, dtype=torch.uint8, device=tensor.device)
            symmetric.rendezvous(self._memory, self.group.group_name)
        x = self._memory[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        x.copy_(tensor)
        torch.cuda.synchronize()
        dist.barrier()  # peers may read it from now on
        return x


@contextmanager
def torch_callers(
    backends: list[str], settings: Settings, rank: int, init_method: str
) -> Iterator[dict[str, TorchCaller]]:  # fmt: skip
    """Join a job of these backends, the first one's group the default; those that this torch lacks are left out.

    On GPUs the default group is unisono's, also if it is no contender. NVLink multicast stays off.
    """
    if not backends:
        yield {}
        return
    first, *others = dict.fromkeys([*["unisono"] * (settings.device == "cuda"), *backends])
    if settings.device == "cuda":
        os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    dist.init_process_group(first, init_method=init_method, rank=rank, world_size=settings.ranks, timeout=_TIMEOUT)
    try:
        callers: dict[str, TorchCaller] = {first: TorchCaller(dist.group.WORLD)}
        callers |= {name: _caller(name, settings) for name in others if _built_in(name)}
        yield callers
    finally:
        dist.destroy_process_group()


def _caller(name: str, settings: Settings) -> TorchCaller:
    """The caller of a group of its own."""
    if name == "symm_mem":
        return SymmetricCaller(dist.new_group(backend="nccl"), settings.largest)
    return TorchCaller(dist.new_group(backend=name))


def _built_in(backend: str) -> bool:
    """True if this torch has the backend at all."""
    name = "nccl" if backend == "symm_mem" else backend
    return name == "unisono" or bool(getattr(dist, f"is_{name}_available")())


def _op(case: Case) -> Any:
    if case.settings.op == "premul_sum":
        return torch._C._distributed_c10d._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, case.settings.op.upper())


def _persistent(case: Case, group: Any, asynchronous: bool) -> Callable[[], Any]:
    """A prepared call. Raises UsageError where the collective cannot be prepared."""
    tensors = {"all_reduce": 1, "reduce": 1, "broadcast": 1, "barrier": 0}.get(case.collective, 2)
    given = (case.output, case.input)[:tensors]
    made = unisono.prepare(case.collective, *given, op=_op(case), root=case.root, group=group)

    def start_and_wait() -> None:
        made.start()
        made.wait()

    call = start_and_wait if asynchronous else made
    return case.on_copy(call) if tensors == 1 else call


def _call(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    """A function that makes one call of torch.distributed's."""
    x, y, root, op = case.input, case.output, case.root, _op(case)
    name, at_root, ranks = case.collective, case.rank == root, case.settings.ranks
    given = list(x.chunk(ranks)) if at_root and name == "scatter" else None
    taken = list(y.chunk(ranks)) if at_root and name == "gather" else None
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(y, op, group, wait),
        "broadcast": lambda: dist.broadcast(y, root, group, wait),
        "reduce": lambda: dist.reduce(y, root, op, group, wait),
        "reduce_scatter": lambda: reduce_scatter_single(y, x, op, group, wait),
        "all_gather": lambda: all_gather_single(y, x, group, wait),
        "all_to_all": lambda: dist.all_to_all_single(y, x, None, None, group, wait),
        "gather": lambda: dist.gather(x, taken, root, group, wait),
        "scatter": lambda: dist.scatter(y, given, root, group, wait),
        "barrier": lambda: dist.barrier(group, wait),
    }
    if name == "send_recv":
        return _send_recv(case, group)
    return case.on_copy(calls[name]) if name in ("all_reduce", "broadcast", "reduce") else calls[name]


def _send_recv(case: Case, group: Any) -> Callable[[], Any]:
    """To the next rank and from the one before, at the same time, as nccl-tests' sendrecv does.

    On GPUs both are given to torch as one batch: two calls, one after the other, may wait for each other.
    """
    x, y, rank, n = case.input, case.output, case.rank, case.settings.ranks
    after, before = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        return lambda: y.copy_(x)
    batch = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, y, before, group)] if x.is_cuda else []

    def exchange() -> None:
        works = dist.batch_isend_irecv(batch) if batch else [dist.isend(x, after, group), dist.irecv(y, before, group)]
        for work in reversed(works):
            if work is not None:  # which is what a rank outside the group gets
                work.wait()

    return exchange
