"""torch.distributed's process group on unisono: one short method per operation, torch's names on the outside.

A Python process group replaces torch's own, so every method that torch calls is here, or in membership.py, whether
torch's C++ calls it (DDP's reducer, functional collectives) or its Python; older spellings are aliases. Every method
returns a Work; that of a synchronous call is complete.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)
from torch.autograd import profiler

from unisono.backend import overloads
from unisono.backend.caller_frame import keep_from_dynamo, waited_for
from unisono.backend.data_ops import DataOps
from unisono.backend.fast_path import KindMaker
from unisono.backend.membership import Membership
from unisono.backend.operations import NOTHING, Operation, Tensors
from unisono.backend.reduce_ops import ReduceOps, scaled
from unisono.backend.sparse import all_reduce_sparse
from unisono.backend.tensors import Result, as_bytes, check, flat_input
from unisono.backend.work import DONE, FinishedWork, PendingWork, SentWork
from unisono.errors import UsageError
from unisono.runtime.collectives import CollectiveTask, Part
from unisono.runtime.message import Message, prepare_message
from unisono.runtime.reduce import op_and_factor
from unisono.runtime.task import in_listener
from unisono.transport.inference import outside_inference

__all__ = ["UnisonoProcessGroup"]

_MISTAKES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, MemoryError, Warning)
"""Errors that torch raises for invalid arguments; all others come from a signal handler."""


def _one_list(lists: list[Tensors], tensors: Tensors) -> bool:
    """Returns True for one list of tensors in a list, and one tensor in a list."""
    return type(tensors) is list and len(tensors) == 1 == len(lists) and type(lists[0]) is list


class UnisonoProcessGroup(Membership):
    """A process group over shared memory for CPU tensors."""

    # Issuing a call

    def _seconds(self, options: Any) -> float:
        """The timeout of the call if it has one, else of the group."""
        seconds = options.timeout.total_seconds() if options is not None else 0.0
        return seconds if seconds > 0 else self._group.timeout

    @outside_inference
    def _general(self, op: str, options: Any, build: Callable[[], Operation]) -> Work:
        group = self._group
        if not group.joined:
            group.join(op)
        queue, operations = group.collectives, group.operations
        try:
            operation = build()
        except UsageError as error:
            operation = operations.refused(op, error)
        except _MISTAKES as error:  # the peers must not wait for this rank, whatever failed
            operation = operations.refused(op, UsageError(f"{type(error).__name__}: {error}"))
        task = CollectiveTask(
            operation.call, operation.parts, operation.outputs, self._seconds(options), operation.deliver
        )
        background = options is None or options.asyncOp
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"unisono:{operation.call.op}"):
                queue.submit(task, background)
        else:
            queue.submit(task, background)
        return PendingWork(queue, task) if background else DONE

    def _fast(self, make: KindMaker, key: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> Work | None:
        """The Work of a call on the fast path (see fast_path.py); None if it needs the general path."""
        group = self._group
        if options is None or not group.joined:
            return None
        prepared = group.fast_path.prepared(make, key, output, tensor)
        if prepared is None:
            return None
        into_at = source_at = output.data_ptr()
        if output is not tensor:
            source_at = tensor.data_ptr()
        if not into_at or not source_at:  # empty, or freed: refused on the general path
            return None
        if output is not tensor and not prepared.fits(into_at, source_at):
            return None
        return self._start((prepared, output, tensor), into_at, source_at, [output], options)

    def _start(self, part: Part, target: int, source: int, outputs: list[Any], options: Any) -> Work:
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"unisono:{part[0].call.op}"):
                return self._issue(part, target, source, outputs, options)
        return self._issue(part, target, source, outputs, options)

    def _issue(self, part: Part, target: int, source: int, outputs: list[Any], options: Any) -> Work:
        queue, background = self._group.collectives, options.asyncOp and not in_listener()
        task = queue.run_now(part, target, source, self._seconds, options, background)
        if task is None:
            task = CollectiveTask(part[0].call, [part], outputs, self._seconds(options))
            queue.submit(task, background)
        if not task.done or task.error is not None:
            task.outputs = outputs
            return PendingWork(queue, task)
        if background and queue.refused[0]:
            queue.raise_rejected()
        return FinishedWork(outputs) if options.asyncOp else DONE

    def _by_lists(self, op: str, key: Any, outputs: Tensors, inputs: Tensors, options: Any) -> Work | None:
        """As `_fast`, on a list of tensors on either side."""
        group = self._group
        found = group.fast_path.lists(op, key, outputs, inputs) if options is not None and group.joined else None
        if found is None:
            return None
        return self._start(found, found[1].data_ptr(), found[2].data_ptr(), list(outputs), options)

    def _overload(self, op: str, method: Callable[..., Work], form: Callable[..., overloads.Form], *given: Any) -> Work:
        """A call by another overload than torch.distributed's functions use (see overloads.py)."""
        try:
            arguments = form(*given)
        except Exception as error:
            refusal = error

            def refuse() -> Operation:
                raise refusal

            return self._general(op, None, refuse)
        return method(*arguments)

    # Operations that combine

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work:
        if type(opts) is not AllreduceOptions or type(tensors) is not list or len(tensors) != 1:
            return self._overload("all_reduce", self.allreduce, overloads.all_reduce, tensors, opts, op, timeout)
        name, factor = op_and_factor(opts.reduceOp)
        tensor = tensors[0]
        mine = tensor if factor == 1 else scaled(tensor, factor)
        if work := self._fast(ReduceOps.all_reduce_kind, name, tensor, mine, opts):
            return work
        if tensor.is_sparse:
            return all_reduce_sparse(self, tensor, name, opts)
        return self._general("all_reduce", opts, lambda: self._group.operations.all_reduce(tensor, name, factor))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        op, factor = op_and_factor(opts.reduceOp)
        return self._general("all_reduce", opts, lambda: self._group.operations.all_reduce_many(tensors, op, factor))

    def reduce(self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Any = None, root: Any = None) -> Work:
        if type(opts) is not ReduceOptions or type(tensors) is not list or len(tensors) != 1:
            return self._overload("reduce", self.reduce, overloads.reduce, tensors, opts, op, timeout, root)
        name, factor = op_and_factor(opts.reduceOp)
        tensor, root = tensors[0], opts.rootRank
        return self._fast(ReduceOps.reduce_kind, (root, name), tensor, scaled(tensor, factor), opts) or self._general(
            "reduce", opts, lambda: self._group.operations.reduce(tensor, root, name, factor)
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        if type(opts) is not ReduceScatterOptions or not _one_list(inputs, outputs):
            form = overloads.reduce_scatter
            return self._overload("reduce_scatter", self.reduce_scatter, form, outputs, inputs, opts, op, timeout)
        name, factor = op_and_factor(opts.reduceOp)
        mine = [scaled(tensor, factor) for tensor in inputs[0]]
        return self._by_lists("reduce_scatter", name, outputs, mine, opts) or self._general(
            "reduce_scatter", opts, lambda: self._group.operations.reduce_scatter(outputs[0], inputs[0], name, factor)
        )

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        op, factor = op_and_factor(opts.reduceOp)
        if work := self._fast(ReduceOps.reduce_scatter_kind, op, output, scaled(tensor, factor), opts):
            return work
        return self._general(
            "reduce_scatter", opts, lambda: self._group.operations.reduce_scatter_single(output, tensor, op, factor)
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        op, factor = op_and_factor(opts.reduceOp)
        return self._general(
            "reduce_scatter", opts, lambda: self._group.operations.reduce_scatter_many(outputs, inputs, op, factor)
        )

    # Operations that move

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Work:
        if type(opts) is not BroadcastOptions or type(tensors) is not list or len(tensors) != 1:
            return self._overload("broadcast", self.broadcast, overloads.broadcast, tensors, opts, timeout, root)
        tensor, root = tensors[0], opts.rootRank
        return self._fast(DataOps.broadcast_kind, root, tensor, tensor, opts) or self._general(
            "broadcast", opts, lambda: self._group.operations.broadcast(tensor, root)
        )

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        if type(opts) is not AllgatherOptions or not _one_list(outputs, tensors):
            return self._overload("all_gather", self.allgather, overloads.all_gather, outputs, tensors, opts, timeout)
        return self._by_lists("all_gather", None, outputs[0], tensors, opts) or self._general(
            "all_gather", opts, lambda: self._group.operations.all_gather(outputs[0], tensors[0])
        )

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self._fast(DataOps.all_gather_kind, None, output, tensor, opts) or self._general(
            "all_gather", opts, lambda: self._group.operations.all_gather_single(output, tensor)
        )

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        return self._general("all_gather", opts, lambda: self._group.operations.all_gather_many(outputs, tensors))

    def allgather_coalesced(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        return self._general("all_gather", opts, lambda: self._group.operations.all_gather_coalesced(outputs, tensors))

    def gather(
        self, outputs: list[Tensors], tensors: Tensors, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        if type(opts) is not GatherOptions or not _one_list(outputs or [[]], tensors):
            return self._overload("gather", self.gather, overloads.gather, outputs, tensors, opts, timeout, root)
        received, root = outputs[0] if outputs else [], opts.rootRank
        return self._by_lists("gather", root, received, tensors, opts) or self._general(
            "gather", opts, lambda: self._group.operations.gather(received, tensors[0], root)
        )

    def scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        if type(opts) is not ScatterOptions or not _one_list(inputs or [[]], outputs):
            return self._overload("scatter", self.scatter, overloads.scatter, outputs, inputs, opts, timeout, root)
        sent, root = inputs[0] if inputs else [], opts.rootRank
        return self._by_lists("scatter", root, outputs, sent, opts) or self._general(
            "scatter", opts, lambda: self._group.operations.scatter(outputs[0], sent, root)
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._by_lists("all_to_all", None, outputs, inputs, opts) or self._general(
            "all_to_all", opts, lambda: self._group.operations.all_to_all(outputs, inputs)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        if type(opts) is not AllToAllOptions:
            opts = overloads.timed(AllToAllOptions, opts, timeout)
        even = not output_splits and not input_splits
        if even and (work := self._fast(DataOps.all_to_all_kind, None, output, tensor, opts)):
            return work
        return self._general(
            "all_to_all",
            opts,
            lambda: self._group.operations.all_to_all_single(output, tensor, output_splits, input_splits),
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        if type(opts) is not BarrierOptions:
            opts = overloads.timed(BarrierOptions, opts, timeout)
        group = self._group
        prepared = group.fast_path.barrier() if group.joined else None
        if prepared:
            return self._start((prepared, NOTHING, NOTHING), 0, 0, [], opts)
        return self._general("barrier", opts, lambda: group.operations.barrier())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names every rank that did not arrive: every barrier of unisono does."""
        opts = overloads.timed(BarrierOptions, timeout, None)
        opts.asyncOp = False
        self.barrier(opts)

    # Messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else overloads.one(tensors)[0]
        if work := self._message_now("send", tensor, peer, tag):
            return work
        return self._message("send", tensor, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else overloads.one(tensors)[0]
        if work := self._message_now("recv", tensor, peer, tag):
            return work
        return self._message("recv", tensor, peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._message("recv", overloads.one(tensors)[0], None, tag)

    def _message_now(self, op: str, tensor: torch.Tensor, peer: int, tag: int) -> Work | None:
        """The Work of a message on an ordinary tensor; None if it needs the general path."""
        group = self._group
        if not group.joined or profiler._is_profiler_enabled:
            return None
        found = group.fast_path.message(op, tensor, tag)
        if found is None or not 0 <= peer < group.size or not tensor.data_ptr():
            return None
        messages, waits = group.messages, waited_for()  # once: a signal handler may leave the group
        message = messages.run_now(found, peer, tensor, group.timeout, not (waits or in_listener()))
        if not isinstance(message, int):
            return PendingWork(messages, message)
        if message and not waits:
            return SentWork(messages, found, peer, tensor, message)
        if messages.refused[0]:
            messages.raise_rejected()
        return DONE if waits else FinishedWork([tensor], peer)

    @outside_inference
    def _prepared(self, op: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        group, after = self._group, None
        if op == "send":
            check(tensor, "the tensor to send")
            data = as_bytes(flat_input(tensor))
        else:
            result = Result(tensor, "the tensor to receive into")
            data, after = as_bytes(result.flat), result.deliver
        if not group.joined:
            group.join(op)
        if peer is not None:
            group.operations.check_rank(peer)
        prepared = prepare_message(group.operations.call(op, tensor), tag, data.numel())
        return Message(prepared, peer, data, [tensor], group.timeout, after)

    def _message(self, op: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        group, background = self._group, not waited_for()
        try:
            message = self._prepared(op, tensor, peer, tag)
        except UsageError as error:
            raise UsageError(f"{op} on rank {group.global_ranks[group.rank]}: {error}") from None
        messages = group.messages
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"unisono:{op}"):
                messages.submit(message, background)
        else:
            messages.submit(message, background)
        return PendingWork(messages, message)

    # Names of earlier and later torch releases

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


keep_from_dynamo(UnisonoProcessGroup)
