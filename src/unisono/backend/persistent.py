"""Persistent calls, the idea of MPI-4: a collective on given tensors is prepared once, then made again and again.

    call = unisono.prepare("all_reduce", x)
    for batch in data:
        ...                 # fills x
        call()              # the same as dist.all_reduce(x), without torch's wrapper and options

Every call is guarded like any other, and a rank may use a persistent call where its peers use torch's functions.
"""

import contextvars
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from unisono.backend.data_ops import DataOps
from unisono.backend.fast_path import KindMaker
from unisono.backend.operations import NOTHING
from unisono.backend.process_group import UnisonoProcessGroup
from unisono.backend.reduce_ops import ReduceOps
from unisono.backend.tensors import check, ordinary
from unisono.errors import UsageError
from unisono.runtime.collectives import CollectiveTask, Part
from unisono.runtime.prepared import Prepared
from unisono.runtime.reduce import op_and_factor
from unisono.runtime.task import Task

__all__ = ["PersistentCall", "prepare"]

_ONE: dict[str, KindMaker] = {
    "all_reduce": ReduceOps.all_reduce_kind,
    "reduce": ReduceOps.reduce_kind,
    "broadcast": DataOps.broadcast_kind,
}
_TWO: dict[str, KindMaker] = {
    "all_gather": DataOps.all_gather_kind,
    "reduce_scatter": ReduceOps.reduce_scatter_kind,
    "all_to_all": DataOps.all_to_all_kind,
}
_MAKERS = {**_ONE, **_TWO}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_SHAPES = {
    "all_gather": "the output needs as many elements as the inputs of all {n} ranks together, of the input's dtype",
    "reduce_scatter": "the input needs {n} times the elements of the output, of its dtype",
    "all_to_all": "output and input must be two tensors of one dtype and shape, whose first dim divides by {n}",
}


def prepare(
    collective: str,
    output: torch.Tensor | None = None,
    input: torch.Tensor | None = None,
    *,
    op: Any = None,
    root: int = 0,
    group: dist.ProcessGroup | None = None,
) -> "PersistentCall":
    """Prepares a collective on these tensors; the object it returns makes the call each time it is called.

    Args:
        collective: all_reduce, reduce or broadcast of one tensor, in place; all_gather, reduce_scatter or all_to_all
            from ``input`` into ``output``, with the shapes of torch's ``*_single`` functions; or barrier.
        output: a contiguous CPU tensor of any dtype that the collective takes.
        input: the same; only for collectives that have an input apart.
        op: the reduce op, SUM if none is given; PREMUL_SUM, which makes a copy of its input, is refused.
        root: the rank within the group that a reduce ends, or a broadcast begins at.
        group: a group of unisono; None for the default group.

    Raises:
        UsageError: the collective, the group or the tensors do not suit; says which, and why.

    """
    pg: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    if not isinstance(pg, UnisonoProcessGroup):
        raise UsageError(f"prepare needs a group of backend unisono, not {dist.get_backend(group)}")
    options = dist.ReduceOptions()
    if op is not None:
        options.reduceOp = op
    name, _ = op_and_factor(options.reduceOp)
    if collective in _REDUCING and name == "PREMUL_SUM":
        raise UsageError(f"prepare {collective}: PREMUL_SUM multiplies a copy of its input; multiply, then use SUM")
    needed = {**dict.fromkeys(_ONE, 1), **dict.fromkeys(_TWO, 2), "barrier": 0}.get(collective)
    if needed is None:
        raise UsageError(f"prepare knows {', '.join((*_ONE, *_TWO, 'barrier'))}, not {collective!r}")
    given = [tensor for tensor in (output, input) if tensor is not None]
    if len(given) != needed:
        raise UsageError(f"prepare {collective} takes {needed} tensor{'s' * (needed != 1)}, got {len(given)}")
    if not pg._group.joined:
        pg._group.join(f"prepare {collective}")
    return PersistentCall(pg, collective, given, name, root)


class PersistentCall:
    """A collective on given tensors. Calling it, or `start` and then `wait`, makes the call once more.

    Not for several threads at a time. Raises what the collective raises. The tensors keep their memory meanwhile.
    """

    def __init__(
        self, pg: UnisonoProcessGroup, collective: str, tensors: list[torch.Tensor], op: str, root: int
    ) -> None:
        self._pg, self._collective, self._tensors, self._op, self._root = pg, collective, tensors, op, root
        self._output: Any = tensors[0] if tensors else NOTHING
        self._input: Any = tensors[-1] if tensors else NOTHING
        self._queue = pg._group.collectives
        self._run_now, self._target, self._source = self._queue.run_now, self._output.data_ptr, self._input.data_ptr
        self._apart = self._input is not self._output
        self._seconds = pg._seconds
        self._task: Task | None = None
        self._part: Part
        self._around = contextvars.copy_context()  # with the algorithm of the block that this is made in
        self._prepare()
        self._queue.preparer.subscribe(self._prepare_again)

    def __repr__(self) -> str:
        return f"<persistent {self._part[0].call.describe(self._pg._group.global_ranks)}>"

    def _prepare_again(self) -> None:
        """Faster ways of running calls are there. Where they can not be used (the group has been left, a tensor has
        lost its memory) the next call raises, not the notification.
        """
        if self._pg._group.joined:
            with suppress(UsageError, AttributeError):  # the group may be left meanwhile
                self._prepare()

    def _prepare(self) -> None:
        self._around.copy().run(self._find)

    def _find(self) -> None:
        ways, name = self._pg._group.fast_path, self._collective
        output, source = self._output, self._input
        found = ways.prepared(_MAKERS[name], self._key, output, source) if self._tensors else ways.barrier()
        if found is None or not self._fits(found):
            raise UsageError(f"prepare {name}: {self._mistake()}")
        self._part = found, output, source

    @property
    def _key(self) -> Any:
        """What tells apart calls on tensors of one dtype and shape."""
        keys = {"reduce": (self._root, self._op), "broadcast": self._root}
        return keys.get(self._collective, self._op if self._collective in _REDUCING else None)

    def _mistake(self) -> str:
        """What is wrong with the tensors, and the remedy."""
        name, operations = self._collective, self._pg._group.operations
        kinds = [f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in self._tensors]
        for tensor, kind in zip(self._tensors, kinds, strict=True):
            shown = f"the tensor {kind}"
            try:
                check(tensor, shown)
            except UsageError as mistake:
                return str(mistake)
            if not tensor.is_contiguous():
                return f"{shown} has strides {list(tensor.stride())}: give a contiguous one, and copy into it and back"
            if not ordinary(tensor):
                return f"{shown} is a {type(tensor).__name__} without plain memory of its own: give it as torch.Tensor"
            if not tensor.numel():
                return f"{shown} is empty: leave the call out on all ranks"
        try:
            made = _MAKERS[name](operations, self._output, self._input, self._key)
        except UsageError as mistake:
            return str(mistake)
        if made is None:
            shapes = ", ".join(
                f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in self._tensors
            )
            return f"{_SHAPES[name].format(n=operations.size)}, got {shapes}"
        return "output and input share memory otherwise than torch.distributed allows in place: give tensors apart"

    def _fits(self, prepared: Prepared) -> bool:
        places = [tensor.data_ptr() for tensor in self._tensors]
        return all(places) and (len(places) < 2 or prepared.fits(*places))

    def __call__(self) -> None:
        """Makes the call and returns when it is done."""
        target = source = self._target()
        if self._apart:
            source = self._source()
        if not (target and source) and self._tensors:
            raise self._lost()
        if self._run_now(self._part, target, source, self._seconds, None) is None:
            self._submit(False)

    def _lost(self) -> UsageError:
        return UsageError(f"{self!r}: a tensor has lost its memory")

    def _submit(self, background: bool) -> Task:
        if not self._pg._group.joined:
            self._pg._group.join(f"{self!r}")  # raises why it cannot be used any more
        task = CollectiveTask(self._part[0].call, [self._part], self._tensors, self._seconds(None))
        self._queue.submit(task, background)
        return task

    def start(self) -> None:
        """Makes the call and returns at once; `wait` ends it. Raises `UsageError` if it has been started already."""
        if self._task is not None:
            raise UsageError(f"{self!r} has been started and not waited for: call wait() first")
        target, source = self._target(), self._source()
        if (not target or not source) and self._tensors:
            raise self._lost()
        task = self._queue.run_now(self._part, target, source, self._seconds, None, background=True)
        self._task = task or self._submit(True)

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the call that `start` made is done; raises `CollectiveTimeout` after ``timeout`` seconds."""
        if self._task is None:
            raise UsageError(f"{self!r} has not been started: call start() first")
        try:
            self._queue.finish(self._task, timeout)
        finally:
            if self._task.done:
                self._task = None
