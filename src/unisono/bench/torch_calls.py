"""Calls through torch.distributed: a group of all ranks for each of its backends, and every collective in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.bench.cases import Case
from unisono.bench.settings import Settings
from unisono.bench.values import FACTOR
from unisono.torch_names import all_gather_single, reduce_scatter_single

__all__ = ["TorchCaller", "torch_callers"]

_TIMEOUT = timedelta(minutes=5)


class TorchCaller:
    """Makes its calls in ``group``, of all ranks; None is the default group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def call(self, case: Case, asynchronous: bool, persistent: bool = False) -> Callable[[], Any]:
        """A function that makes one call and is back when it is done."""
        if persistent:
            return _persistent(case, self.group, asynchronous)
        start = _CALLS[case.collective](case, self.group, asynchronous)
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


@contextmanager
def torch_callers(
    backends: list[str], settings: Settings, rank: int, init_method: str
) -> Iterator[dict[str, TorchCaller]]:
    """Join a job of these backends, the first one's group the default; those that this torch lacks are left out."""
    if not backends:
        yield {}
        return
    first, *others = backends
    dist.init_process_group(first, init_method=init_method, rank=rank, world_size=settings.ranks, timeout=_TIMEOUT)
    try:
        groups = {first: dist.group.WORLD} | {name: dist.new_group(backend=name) for name in others if _built_in(name)}
        yield {name: TorchCaller(group) for name, group in groups.items()}
    finally:
        dist.destroy_process_group()


def _built_in(backend: str) -> bool:
    """True if this torch has the backend at all."""
    return backend == "unisono" or bool(getattr(dist, f"is_{backend}_available")())


def _op(case: Case) -> Any:
    if case.settings.op == "premul_sum":
        return torch._C._distributed_c10d._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, case.settings.op.upper())


def _copied(case: Case, call: Callable[[], Any]) -> Callable[[], Any]:
    """Out of place, torch's in-place collectives are called on a copy, and the copy counts."""
    if case.place == "in":
        return call

    def copy_and_call() -> Any:
        case.output.copy_(case.input)
        return call()

    return copy_and_call


def _persistent(case: Case, group: Any, asynchronous: bool) -> Callable[[], Any]:
    """A prepared call. Raises UsageError where the collective cannot be prepared."""
    tensors = {"all_reduce": 1, "reduce": 1, "broadcast": 1, "barrier": 0}.get(case.collective, 2)
    given = (case.output, case.input)[:tensors]
    made = unisono.prepare(case.collective, *given, op=_op(case), root=case.root, group=group)

    def start_and_wait() -> None:
        made.start()
        made.wait()

    call = start_and_wait if asynchronous else made
    return _copied(case, call) if tensors == 1 else call


def _all_reduce(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    op, x = _op(case), case.output
    return _copied(case, lambda: dist.all_reduce(x, op, group, wait))


def _broadcast(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, root = case.output, case.root
    return _copied(case, lambda: dist.broadcast(x, root, group, wait))


def _reduce(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    op, x, root = _op(case), case.output, case.root
    return _copied(case, lambda: dist.reduce(x, root, op, group, wait))


def _reduce_scatter(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    op, x, y = _op(case), case.input, case.output
    return lambda: reduce_scatter_single(y, x, op, group, wait)


def _all_gather(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, y = case.input, case.output
    return lambda: all_gather_single(y, x, group, wait)


def _all_to_all(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, y = case.input, case.output
    return lambda: dist.all_to_all_single(y, x, None, None, group, wait)


def _gather(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    x, root = case.input, case.root
    parts = list(case.output.chunk(case.settings.ranks)) if case.rank == root else None
    return lambda: dist.gather(x, parts, root, group, wait)


def _scatter(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    y, root = case.output, case.root
    parts = list(case.input.chunk(case.settings.ranks)) if case.rank == root else None
    return lambda: dist.scatter(y, parts, root, group, wait)


def _barrier(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    return lambda: dist.barrier(group, wait)


def _send_recv(case: Case, group: Any, wait: bool) -> Callable[[], Any]:
    """To the next rank and from the one before, at the same time, as nccl-tests' sendrecv does."""
    x, y, rank, n = case.input, case.output, case.rank, case.settings.ranks
    after, before = (rank + 1) % n, (rank - 1) % n
    if n == 1:
        return lambda: y.copy_(x)

    def exchange() -> None:
        works = [dist.isend(x, after, group), dist.irecv(y, before, group)]
        for work in reversed(works):
            if work is not None:  # which is what a rank outside the group gets
                work.wait()

    return exchange


_CALLS: dict[str, Callable[[Case, Any, bool], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "send_recv": _send_recv,
}
