"""Queues: where calls wait for their turn, and the one loop that carries them forward.

A queue holds the calls of one rank in one group that are under way: its collectives (collectives.py), or its messages
(messages.py). Whoever needs a call done carries the queue forward: the caller inside a synchronous call, `wait` or
`is_completed`; or a worker thread (worker.py), started when a call is asynchronous. The worker carries calls from the
beginning where a core is free for it (progress.py); else it only keeps a call that nobody waits for from blocking the
others, since handing a call to a thread and back costs more than most calls. Carrying forward holds the queue's lock
while it waits for a millisecond or moves data for some; longer sleeping is done outside.

Who watches calls is told of them, and asked about peers, through a `Monitor` (monitor.py).
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from unisono.errors import CollectiveTimeout, DeadlockError, MismatchError, UnisonoError, UsageError
from unisono.runtime.call import Call, Site, call_site
from unisono.runtime.monitor import Monitor, Wait
from unisono.runtime.rejected_messages import RejectedMessages
from unisono.runtime.task import (
    Access,
    Task,
    copy_error,
    in_listener,
    interruption,
    others_in_listeners,
    reentry_error,
    run_listeners,
)
from unisono.runtime.worker import Worker
from unisono.transport.layout import REFUSED
from unisono.transport.process import Identity
from unisono.transport.segment import Segment

__all__ = ["CallQueue", "any_listeners"]

_queues: "weakref.WeakSet[CallQueue]" = weakref.WeakSet()
_CHECK_INTERVAL = 0.05  # s: how long anybody sleeps before looking around
_LOCK_INTERVAL = 0.0002  # s: how often somebody who waits for the lock looks whether the call is done
_SHARED_INTERVAL = 0.001  # s: the same when several threads wait, one of whom may have carried the call of another


class CallQueue(ABC):
    """Calls under way, the lock that guards them, and the worker."""

    def __init__(self, segment: Segment, rank: int, global_ranks: Sequence[int], label: str, monitor: Monitor) -> None:
        self._segment, self._rank, self._global_ranks, self._label = segment, rank, global_ranks, label
        self.monitor = monitor
        self.failed: UnisonoError | None = None
        self.access = Access(self)
        self._new_locks()
        self._to_notify: deque[Task] = deque()
        self._worker = Worker(self, label)
        self._waiters = 0  # threads inside `finish`: while there are any, the worker leaves the queue to them
        self._closed = False
        self._waited: tuple[Task, Wait] | None = None  # the wait of the thread that looks around
        self.async_progress = False
        """True if cores are free for the worker: it carries calls of the background from the first moment on."""
        self.rejected: RejectedMessages | None = None
        at = segment.field(rank, REFUSED)
        self.refused = segment.longs[at : at + 1]
        """One word, not 0 if a peer has rejected a message of this rank: the next call then runs `raise_rejected`."""
        _queues.add(self)

    def _new_locks(self) -> None:
        self._lock = threading.RLock()
        self._marking = threading.RLock()  # held while a call is marked as done, or its waiters are counted
        self.entered: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        """True if this thread holds the queue; true where a signal handler or finalizer asks in the midst of a call."""

    def _refuse_reentry(self, call: Call, what: str = "") -> None:
        """Raises `UsageError` if this thread is in the midst of another call of this queue."""
        if self.entered():
            raise reentry_error(what + call.describe(self._global_ranks), self._label)

    @abstractmethod
    def busy(self) -> bool:
        """True if any call is under way."""

    @abstractmethod
    def _progress(self, spin: bool) -> None:
        """Carries the calls as far as they go without blocking; ``spin``: waits while that is cheap. Lock held."""

    @abstractmethod
    def _enqueue(self, task: Task) -> None:
        """Takes a call in. Lock held."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleeps until something may have moved, at most ``seconds``. Lock not held."""

    @abstractmethod
    def _check_peers(self) -> None:
        """Called about every `_CHECK_INTERVAL` of waiting: deadlines, lost peers. Fails calls by `_fail`. Lock held."""

    @abstractmethod
    def _fail(self, task: Task, error: UnisonoError) -> None:
        """Ends ``task`` with ``error``, and whatever can no longer be done after that. Lock held."""

    @abstractmethod
    def _locate(self, task: Task, site: Site) -> None:
        """Notes where ``task``, which is under way, was made. Lock held."""

    def submit(self, task: Task, background: bool) -> None:
        """Takes a call in. In the background it is carried as far as it goes now; else it is done on return.

        Raises the call's own error if it is not left to the background. A listener's own calls never are: it may run on
        the worker, which could not carry them while the listener waits for them.
        """
        self._refuse_reentry(task.call)
        background = background and not in_listener()
        try:
            with self._lock:
                self._refuse_if_failed()
                self._enqueue(task)
                self._run_progress(spin=not background)
        except UnisonoError:
            raise
        except BaseException as error:  # nobody can take it up again
            self.abandon(task, error)
            raise
        self.leave(task, background)

    def leave(self, task: Task, background: bool) -> None:
        """Leaves the rest of a call that was issued to the worker, or finishes it in this thread."""
        try:
            if not background:
                self.finish(task, held=False)
                return
            self._notify_listeners()
            if not task.done:
                with self._lock:
                    task.site = call_site()
                    self._locate(task, task.site)
                self._worker.wake()
        except UnisonoError:
            raise
        except BaseException as error:
            self.abandon(task, error)
            raise

    def _refuse_if_failed(self) -> None:
        if self.failed is not None:
            again = copy_error(self.failed)
            again.args = (f"this group has failed before and can only be destroyed: {self.failed}",)
            raise again

    def _run_progress(self, spin: bool) -> None:
        """Carries the calls. An exception that comes in between (Ctrl-C, a signal handler's) must not leave half a step
        behind that later calls would build on: the queue gives up. Lock held.
        """
        try:
            self._progress(spin)
        except BaseException as error:
            self._abort(interruption(error))
            raise
        if self._closed and self.failed is not None:  # by a signal handler, meanwhile
            self._fail_all(self.failed)

    def _abort(self, error: UnisonoError) -> None:
        """No call can follow in this queue, and the peers are told unless it has left them. Lock held."""
        if not self._closed:
            self.failed = copy_error(error)
            self.monitor.gave_up(error)
        self._fail_all(error)

    def finish(self, task: Task, timeout: float | None = None, held: bool = True) -> None:
        """Carries the queue until ``task`` is done and raises its error, or `CollectiveTimeout` after ``timeout`` s.

        ``held``: somebody has a Work of it, and may wait again if an exception from elsewhere (Ctrl-C, or one that a
        signal handler raises) ends this wait.
        """
        if not task.done:
            self._refuse_reentry(task.call, "the wait for ")
            try:
                error = self._progress_until(task, timeout)
            except BaseException as foreign:
                self.abandon(task, foreign, held)
                raise
            if error is not None:
                raise error
        self._notify_listeners()
        if task.error is not None:
            raise task.error
        if self.refused[0]:
            self.raise_rejected(task)

    def raise_rejected(self, task: Task | None = None) -> None:
        """Raises the error of a message that a peer has refused, at the end of ``task`` or of a call that had none."""
        if error := self._rejected_error(task, "The call that raises this has been carried out."):
            raise error

    def abandon(self, task: Task, error: BaseException, held: bool = False) -> None:
        """``error``, from elsewhere, has ended the wait for ``task``; ``held``: see `finish`."""
        with self._lock:
            if task in self._under_way():
                self._on_interrupt(task, interruption(error), held)

    def _progress_until(self, task: Task, timeout: float | None) -> UnisonoError | None:
        """Returns once ``task`` is done, or with an error of this wait alone. What it raises comes from elsewhere."""
        limit = None if timeout is None else time.monotonic() + timeout
        check_at = time.monotonic() + _CHECK_INTERVAL
        wait: Wait | None = None
        waiting = 0
        try:
            with self._marking:
                self._worker.backoff.visits += 1
                waiting, self._waiters = 1, self._waiters + 1
            while self._acquire(task):
                with ExitStack() as held:
                    held.callback(self._lock.release)
                    self._run_progress(spin=not task.done)
                    if not task.done and time.monotonic() >= check_at:
                        if self.refused[0] and (error := self._on_rejected(task)):
                            return error
                        wait = wait or self._long_wait(task)
                        if words := wait.check(self._needs(task)):  # first, for a peer may have ended over it already
                            self._fail(task, DeadlockError(words))
                        else:
                            self._waited = task, wait
                            self._check_peers()
                            self._waited = None
                        check_at = time.monotonic() + _CHECK_INTERVAL
                self._notify_listeners()
                if task.done:
                    return None
                slice_ = _CHECK_INTERVAL if self._waiters == 1 else _SHARED_INTERVAL
                if limit is not None:
                    left = limit - time.monotonic()
                    if left <= 0:
                        what = f"did not end within the timeout of {timeout:g} s of this wait"
                        error = CollectiveTimeout(self.explain(task, what))
                        self.monitor.failed(error)
                        return error
                    slice_ = min(slice_, left)
                self._sleep(slice_)
            return None
        finally:
            with self._marking:
                self._waiters -= waiting
            if self.busy():
                self._worker.remind()
            if wait is not None:
                wait.end()

    def _acquire(self, task: Task) -> bool:
        """Takes the lock, or returns False once the worker, which may hold it for long, has done ``task``."""
        while not self._lock.acquire(timeout=_LOCK_INTERVAL):
            if task.done:
                return False
        return True

    def _fail_lost_peer(self, task: Task, error: UnisonoError) -> None:
        """Ends ``task``, whose peer is gone; one that ended over a deadlock of both has said so before. Lock held."""
        words = self._waited[1].check(self._needs(task)) if self._waited and self._waited[0] is task else ""
        self._fail(task, DeadlockError(words) if words else error)

    def _rejected_error(self, task: Task | None, outcome: str) -> UnisonoError | None:
        """The error of a message that a peer has refused, of ``task`` itself or of another that nobody was told of.

        ``outcome`` says what has become of ``task``, if it is not to blame itself.
        """
        found = self.rejected.take() if self.rejected else None
        return MismatchError(f"{found[0]}. {outcome}") if found else None

    @abstractmethod
    def _on_rejected(self, task: Task) -> UnisonoError | None:
        """A peer has refused a message, which a wait for ``task`` that has become long must not conceal. Lock held.

        Ends the call with the error, or returns it for the wait alone.
        """

    def _long_wait(self, task: Task) -> Wait:
        """The wait for ``task`` has become long. Lock held."""
        here = call_site()
        if task.site is None:  # a synchronous call is made where it waits: noted while it does, for records made later
            task.site = here
            self._locate(task, here)
        return self.monitor.waits(partial(self.explain, task, "waits", briefly=True, placed=False), here)

    def _on_interrupt(self, task: Task, error: UnisonoError, held: bool) -> None:
        """The wait for ``task`` was interrupted; if it is not ``held``, nobody can take it up again. Lock held."""
        if not held:
            self._abort(error)

    @abstractmethod
    def _needs(self, task: Task) -> list[Identity]:
        """The processes without whose further calls ``task`` can certainly never end. Lock held."""

    @abstractmethod
    def explain(self, task: Task, what: str, briefly: bool = False, placed: bool = True) -> str:
        """A call that did not end: what it is (if ``placed``, where) and who is missing (unless ``briefly``, where)."""

    def poll(self, task: Task) -> bool:
        """Carries the queue without waiting, unless the worker does so anyway; whether ``task`` is done."""
        if not task.done and not self.async_progress and not self.entered() and self._lock.acquire(blocking=False):
            try:
                self._run_progress(spin=False)
            finally:
                self._lock.release()
            self._notify_listeners()
        return task.done

    def listen(self, task: Task, listener: Callable[[Task], None]) -> None:
        """Calls ``listener(task)`` once the call is done, from whichever thread carries it then."""
        with self._marking:
            waits = not task.done
            if waits:
                task.listeners.append(listener)
        if not waits:
            listener(task)
            return
        self._worker.wake()
        self._worker.backoff.hurry()

    def close(self, error: UnisonoError) -> None:
        """Ends every call under way with ``error``, and the worker.

        In the midst of a call of this thread, that call ends them when it goes on, and the worker is not waited for.
        """
        inside = self.entered()
        with self._lock:
            self._closed = True
            self.failed = self.failed or error
            if not inside:
                self._fail_all(error)
        self._notify_listeners()
        self._worker.end(wait=not inside)
        if not inside:
            self.access.queue = None

    @abstractmethod
    def _fail_all(self, error: UnisonoError) -> None:
        """Ends every call under way with ``error``. Lock held."""

    def _end(self, task: Task, error: BaseException | None = None) -> None:
        """Marks a call done. Lock held."""
        with self._marking:
            task.error, task.done = error, True
            if task.listeners:
                self._to_notify.append(task)

    def _notify_listeners(self) -> None:
        """Tells the listeners of calls that are done; outside the lock, since they may issue calls of their own."""
        while self._to_notify:
            try:
                task = self._to_notify.popleft()
            except IndexError:  # another thread was quicker
                return
            run_listeners(task)

    def disown(self) -> None:
        """In a forked child: the calls and the lock are the parent's, whose threads do not exist here."""
        self._new_locks()
        self._closed, self.access.queue = True, None
        self.failed = UsageError(f"{self._label} belongs to the process that this one was forked from")
        self._to_notify.clear()
        for task in self._under_way():  # not `_fail_all`: what is shared is the parent's
            task.error, task.done = self.failed, True
        _queues.discard(self)

    def idle(self) -> bool:
        """True if there is nothing here for the worker."""
        return bool(self._waiters) or self._closed or not self.busy()

    def work(self, check_at: float) -> float:
        """A piece of the worker's work: carries calls, and looks around if the time for that, ``check_at``, has come.

        Returns when to look around next. An error that nothing else catches ends the calls of this queue.
        """
        try:
            with self._lock:
                self._progress(spin=False)  # a worker that spins takes a part of the core from who computes
                if self.busy() and time.monotonic() >= check_at:
                    self._check_peers()
                    check_at = time.monotonic() + _CHECK_INTERVAL
            self._notify_listeners()
            if not self.idle():
                self._sleep(_CHECK_INTERVAL)
        except Exception as error:
            with self._lock:
                self._abort(UnisonoError(f"the worker broke off: {type(error).__name__}: {error}"))
            self._notify_listeners()
        return check_at

    def _has_listeners(self) -> bool:
        """True if the end of a call under way may make this process issue others."""
        return bool(self._to_notify) or any(task.listeners for task in self._under_way())

    @abstractmethod
    def _under_way(self) -> Sequence[Task]:
        """All calls under way."""


def any_listeners() -> bool:
    """The same of all queues of this process, and of listeners that another thread runs just now."""
    return others_in_listeners() or any(queue._has_listeners() for queue in list(_queues))
