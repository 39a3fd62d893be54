"""A call under way in a queue, its listeners, and the errors that end it."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import MismatchError, UnisonoError, UsageError, first_line
from unisono.runtime.call import Call, Site, site_text
from unisono.runtime.call_site import call_site, interrupted_site
from unisono.transport.futex import SPIN_NS
from unisono.transport.shared_heap import keep, place

if TYPE_CHECKING:
    from unisono.runtime.queue import CallQueue

__all__ = [
    "MIN_PATIENCE_NS", "Access", "ConsensusError", "Task", "copy_error", "in_listener", "internal_error",
    "interruption", "keep_shared", "others_in_listeners", "patience_for", "reentry_error", "run_listeners",
]  # fmt: skip

MIN_PATIENCE_NS, _PATIENCE_NS_PER_BYTE = 20_000, 0.25  # ns, ns per byte


class Task:
    """One call under way: its arguments, its outcome."""

    __slots__ = ("call", "deadline", "done", "error", "issued", "listeners", "outputs", "site")

    def __init__(self, call: Call, outputs: list[Any], timeout: float) -> None:
        self.call, self.outputs = call, outputs
        self.site: Site | None = None  # its call site, if that is not on the stack any more
        self.issued = time.monotonic()
        self.deadline = self.issued + timeout
        self.done = False
        self.error: BaseException | None = None
        self.listeners: list[Callable[[Task], None]] = []

    def raise_error(self) -> None:
        """Raises the error, if there is one: a copy, for its traceback refers to frames, and these to the task."""
        if self.error is not None:
            raise copy_error(self.error) if isinstance(self.error, UnisonoError) else self.error

    def place(self) -> str:
        """``, at file:line in function,``: its call site, within a sentence; empty if that is not known."""
        return f", at {site_text(self.site)}," if self.site is not None and self.site[0] else ""

    def overdue(self) -> str:
        """Words on a deadline that has passed; empty before that."""
        if time.monotonic() <= self.deadline:
            return ""
        return f"did not end within its timeout of {self.deadline - self.issued:g} s"


class Access:
    """A reference to a queue until that is closed: a Work kept for longer does not keep the group's memory."""

    __slots__ = ("queue",)

    def __init__(self, queue: "CallQueue") -> None:
        self.queue: CallQueue | None = queue


def patience_for(call: Call) -> int:
    """Nanoseconds that a call in the background polls for its peers: about the time its data takes to move."""
    return min(SPIN_NS, MIN_PATIENCE_NS + int(_PATIENCE_NS_PER_BYTE * call.nbytes))


class _Listening(threading.local):
    on = False  # while this thread runs listeners


_listening = _Listening()
_listener_threads: set[int] = set()  # threads for which it is


def in_listener() -> bool:
    """True if this thread runs a listener: its calls are not left to the background."""
    return _listening.on


def run_listeners(task: Task) -> None:
    """Runs the listeners of a call that is done."""
    before, me = in_listener(), threading.get_ident()
    _listener_threads.add(me)
    _listening.on = True
    try:
        for listener in task.listeners:
            listener(task)
    finally:
        _listening.on = before
        if not before:
            _listener_threads.discard(me)


def others_in_listeners() -> bool:
    """True if another thread than this one runs listeners, which may issue calls."""
    return bool(_listener_threads - {threading.get_ident()})


os.register_at_fork(after_in_child=_listener_threads.clear)


class ConsensusError(Exception):
    """An error of a call on which all ranks agree: the call ends, and the queue goes on."""

    def __init__(self, error: MismatchError | UsageError) -> None:
        super().__init__(str(error))
        self.error = error


def keep_shared(outputs: Sequence[Any]) -> None:
    """Keeps the memory of results of a failed call, which a late peer may still write to, from reuse."""
    keep(*(t for t in outputs if isinstance(t, torch.Tensor) and t.is_cpu and place(t.data_ptr(), t.nbytes) >= 0))


def internal_error(error: BaseException) -> UnisonoError:
    """The error of a collective that failed inside by ``error``."""
    return UnisonoError(f"a collective broke off inside: {type(error).__name__}: {error}")


def copy_error(error: UnisonoError, text: str = "") -> UnisonoError:
    """A copy to keep and to raise again: an error that was raised keeps a traceback, and with it memory.

    ``text``: another one than its own.
    """
    copy = type(error)(*((text,) if text else error.args))
    copy.cause = error.cause
    return copy


def reentry_error(what: str, label: str) -> UsageError:
    """The error of a call, ``what``, of the group called ``label`` in the midst of another one of this thread.

    Python runs signal handlers and finalizers between any two steps of whatever the thread is in, so one that calls
    unisono may find its queue held by the call that it interrupts, below it on the same stack. No wait could end: such
    a call is refused. Leaving the group is not, for a program ends like that on SIGTERM.
    """
    return UsageError(
        f"{what} at {site_text(call_site())} interrupts a call of {label} at {site_text(interrupted_site())}: a signal "
        "handler or a finalizer can not communicate then; set a flag in it, and act on that outside"
    )


def interruption(error: BaseException) -> UnisonoError:
    """The error of a call that a foreign exception has interrupted: Ctrl-C, or a signal handler's."""
    words = f": {first_line(error)}" if str(error) else ""
    return UnisonoError(f"{type(error).__name__} interrupted a call under way{words}")
