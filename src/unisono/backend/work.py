"""The Work of a call, over its task, and its future."""

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.autograd import profiler

from unisono.errors import UsageError
from unisono.runtime.message import Message, PreparedMessage
from unisono.runtime.queue import CallQueue
from unisono.runtime.task import Task

__all__ = ["DONE", "FinishedWork", "PendingWork", "SentWork"]


_begin = Work.__init__  # found once: it is called for every call that returns a Work


def _seconds(timeout: timedelta | None) -> float | None:
    """None for "no limit of its own", which torch writes as zero or a negative time."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


def _received(source: int) -> int:
    if source < 0:
        raise UsageError("source_rank is of a receive: this call has no rank from which a message came")
    return source


class FinishedWork(Work):
    """A call that was done before it returned; its ``outputs`` are the result, from rank ``source`` if received."""

    __slots__ = ("_outputs", "_source")

    def __init__(self, outputs: list[torch.Tensor], source: int = -1) -> None:
        _begin(self)
        self._outputs, self._source = outputs, source

    def source_rank(self) -> int:
        """Group rank from which a message came. Raises UsageError for another call."""
        return _received(self._source)

    _source_rank = source_rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


DONE = FinishedWork([])
"""Shared by all synchronous calls."""


class PendingWork(Work):
    """A call that may still be under way.

    `wait` progresses it in the caller's thread and raises its error; `is_completed` progresses it without waiting.
    The future completes with the list of output tensors, or raises the error.
    """

    __slots__ = ("_access", "_task")

    def __init__(self, queue: CallQueue, task: Task) -> None:
        _begin(self)
        self._access, self._task = queue.access, task

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the call is done; raises its error, or `CollectiveTimeout` after ``timeout`` (the call goes on)."""
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"unisono:wait {self._task.call.op}"):
                self._finish(timeout)
        else:
            self._finish(timeout)
        return True

    def _finish(self, timeout: timedelta | None) -> None:
        queue = self._access.queue
        if queue is not None:
            queue.finish(self._task, _seconds(timeout))
        else:
            self._task.raise_error()

    def _ended(self) -> bool:
        queue = self._access.queue
        return queue.poll(self._task) if queue is not None else self._task.done

    def is_completed(self) -> bool:
        """True if the call has ended, well or not."""
        return self._ended()

    def is_success(self) -> bool:
        """True if the call has ended well."""
        return self._ended() and self._task.error is None

    def exception(self) -> BaseException | None:
        """The error the call ended with, if it did."""
        return self._task.error

    def synchronize(self) -> None:
        """The same as `wait`: there is no stream to order on a CPU."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once done."""
        self.wait()
        return self._task.outputs

    def source_rank(self) -> int:
        """Group rank from which a message came. Raises UsageError for another call."""
        return _received(self._task.source if isinstance(self._task, Message) else -1)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the output tensors.

        An exception set on a future from Python is invisible to C++ (DDP would read it as gradients), so the error is
        raised by a ``then`` step, which C++ does see.
        """
        task, queue = self._task, self._access.queue
        outputs: torch.futures.Future[Any] = torch.futures.Future()
        if self._ended() and task.error is None:
            outputs.set_result(task.outputs)
            return outputs
        if queue is not None:
            queue.listen(task, lambda _: outputs.set_result(None))
        else:
            outputs.set_result(None)
        return outputs.then(lambda _: _outcome(task))


def _outcome(task: Task) -> list[torch.Tensor]:
    task.raise_error()
    return task.outputs


class SentWork(FinishedWork):
    """A send that is through, of which only a refusal may follow: it has a `Message` from then on."""

    __slots__ = ("_access", "_message", "_sent")

    def __init__(
        self, queue: CallQueue, prepared: PreparedMessage, peer: int, tensor: torch.Tensor, number: int
    ) -> None:
        _begin(self)
        self._outputs, self._source = [tensor], -1
        self._access, self._sent = queue.access, (prepared, peer, number)
        self._message: Message | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the error of a refusal that has come."""
        queue = self._access.queue
        if self._message is None:
            if queue is None or not queue.refused[0]:
                return True
            prepared, peer, number = self._sent
            self._message = Message(prepared, peer, self._outputs[0], self._outputs, 0.0)
            self._message.number, self._message.done = number, True
        if queue is not None:
            queue.finish(self._message)
        self._message.raise_error()
        return True

    def is_success(self) -> bool:
        return self.exception() is None

    def exception(self) -> BaseException | None:
        return None if self._message is None else self._message.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future, message = super().get_future(), self._message
        return future if message is None else future.then(lambda _: _outcome(message))
