"""Queues of calls, and the one loop that progresses them.

A queue holds the calls of one rank in one group that are under way: its collectives (collectives.py), or its messages
(messages.py). Progress is made by the caller, inside a synchronous call, `wait` or `is_completed`; or by a worker
thread (worker.py), started by an asynchronous call. The worker makes progress from the beginning if a core is free for
it; else it only keeps a call without a waiter from blocking the others, since handing a call to a thread and back costs
more than most calls. The queue's lock is held while a call polls for a millisecond or moves data, not in longer sleeps.

A queue reports its calls to a `Monitor` (monitor.py), and asks it about peers.
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
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
_CHECK_INTERVAL = 0.05  # s between two checks of peers and deadlines
_LOCK_INTERVAL = 0.0002  # s between two checks of a waiter for the lock whether its call is done
_SHARED_INTERVAL = 0.001  # s: the same for several waiters, one of which may complete the call of another


class CallQueue(ABC):
    """Calls under way, the lock that guards them, and the worker."""

    def __init__(self, segment: Segment, rank: int, global_ranks: Sequence[int], label: str, monitor: Monitor) -> None:
        self._segment, self._rank, self._global_ranks, self._label = segment, rank, global_ranks, label
        self.monitor = monitor
        self.failed: UnisonoError | None = None
        self.lost_over: UnisonoError | None = None  # the error of the last call that failed over a lost peer
        self.access = Access(self)
        self._new_locks()
        self._to_notify: deque[Task] = deque()
        self._worker = Worker(self, label)
        self._closed, self._waiters = False, 0  # threads inside `finish`, to which the worker leaves the queue
        self._waited: tuple[Task, Wait] | None = None  # the wait of the thread that checks peers
        self.async_progress = False
        """True if cores are free for the worker: it progresses calls of the background from the beginning."""
        self.rejected: RejectedMessages | None = None
        at = segment.field(rank, REFUSED)
        self.refused = segment.longs[at : at + 1]
        """One word, not 0 if a peer has rejected a message of this rank: the next call then runs `raise_rejected`."""
        _queues.add(self)

    def _new_locks(self) -> None:
        self._lock = threading.RLock()
        self._marking = threading.RLock()  # held while a call is marked as done, or its waiters are counted
        self.entered: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        """True if this thread holds the queue: in a signal handler or finalizer that interrupts a call."""
        self._holding = self.entered, self._lock.acquire, self._lock.release

    def _refuse_reentry(self, call: Call, what: str = "") -> None:
        """Raises `UsageError` if this thread is in the midst of another call of this queue."""
        if self.entered():
            raise reentry_error(what + call.describe(self._global_ranks), self._label)

    @abstractmethod
    def busy(self) -> bool:
        """True if any call is under way."""

    @abstractmethod
    def _progress(self, spin: bool) -> None:
        """Progresses the calls as far as they go without blocking; ``spin``: polls while that is cheap. Lock held."""

    @abstractmethod
    def _enqueue(self, task: Task) -> None:
        """Appends a call. Lock held."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleeps until something may have moved, at most ``seconds``. Lock not held."""

    @abstractmethod
    def _check_peers(self) -> None:
        """Checks deadlines and lost peers, about every `_CHECK_INTERVAL`; fails calls by `_fail`. Lock held."""

    @abstractmethod
    def _fail(self, task: Task, error: UnisonoError) -> None:
        """Ends ``task`` with ``error``, and the calls that can not follow it. Lock held."""

    @abstractmethod
    def _locate(self, task: Task, site: Site) -> None:
        """Records the call site of ``task``, which is under way. Lock held."""

    def submit(self, task: Task, background: bool) -> None:
        """Issues a call. In the ``background`` it progresses as far as it goes now; else it is complete on return.

        Raises the call's own error unless it is in the background. Calls of a listener never are: it may run on the
        worker, which could not progress them while the listener waits for them.
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
        except BaseException as error:  # no Work of it exists
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
            raise copy_error(self.failed, f"this group has failed before and can only be destroyed: {self.failed}")

    def _run_progress(self, spin: bool) -> None:
        """Progresses the calls; aborts the queue on a foreign exception, which leaves half a step. Lock held."""
        try:
            self._progress(spin)
        except BaseException as error:
            self._abort(interruption(error))
            raise
        if self._closed and self.failed is not None:  # by a signal handler, meanwhile
            self._fail_all(self.failed)

    def _abort(self, error: UnisonoError) -> None:
        """Fails the queue for good, and publishes that to the peers unless it has left them. Lock held."""
        if not self._closed:
            self.monitor.gave_up(error)  # first: it completes the error's cause
            self.failed = copy_error(error)
        self._fail_all(error)

    def finish(self, task: Task, timeout: float | None = None, held: bool = True) -> None:
        """Progresses the queue until ``task`` is done; raises its error, or `CollectiveTimeout` after ``timeout`` s.

        ``held``: the caller has a Work of it, and may wait again if a foreign exception (Ctrl-C, or one of a signal
        handler) ends this wait.
        """
        if not task.done:
            self._refuse_reentry(task.call, "the wait for ")
            try:
                error = self._progress_until(task, timeout)
            except BaseException as foreign:
                self.abandon(task, foreign, held)
                raise
            if error is not None:
                raise copy_error(error)  # what this frame refers to has no traceback, which would refer to this frame
        self._notify_listeners()
        task.raise_error()
        if self.refused[0]:
            self.raise_rejected(task)

    def raise_rejected(self, task: Task | None = None) -> None:
        """Raises the error of a message that a peer has rejected, at the end of ``task`` or of a call without one."""
        if error := self._rejected_error(task, "The call that raises this has been carried out."):
            raise copy_error(error)

    def abandon(self, task: Task, error: BaseException, held: bool = False) -> None:
        """Ends the wait for ``task`` by ``error``, a foreign exception; ``held``: see `finish`."""
        with self._lock:
            if task in self._under_way():
                self._on_interrupt(task, interruption(error), held)

    def _progress_until(self, task: Task, timeout: float | None) -> UnisonoError | None:
        """Returns once ``task`` is done, or with an error of this wait alone. It raises foreign exceptions only."""
        limit = None if timeout is None else time.monotonic() + timeout
        check_at = time.monotonic() + _CHECK_INTERVAL
        wait: Wait | None = None
        waiting = 0
        try:
            with self._marking:
                self._worker.backoff.visits += 1
                waiting, self._waiters = 1, self._waiters + 1
            while True:
                try:  # a signal handler may raise as soon as the lock is taken
                    while not self._lock.acquire(timeout=_LOCK_INTERVAL):
                        if task.done:  # the worker, which may hold it for long, has completed it
                            return None
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
                finally:
                    try:  # noqa: SIM105  # nothing may come before the release
                        self._lock.release()
                    except RuntimeError:  # not taken
                        pass
                self._notify_listeners()
                if task.done:
                    return None
                interval = _CHECK_INTERVAL if self._waiters == 1 else _SHARED_INTERVAL
                if limit is not None:
                    left = limit - time.monotonic()
                    if left <= 0:
                        error = self._late(task, f"did not end within the timeout of {timeout:g} s of this wait")
                        self.monitor.failed(error)
                        return error
                    interval = min(interval, left)
                self._sleep(interval)
        finally:
            with self._marking:
                self._waiters -= waiting
            if self.busy():
                self._worker.remind()
            if wait is not None:
                wait.end()

    def _fail_lost_peer(self, task: Task, error: UnisonoError) -> None:
        """Fails ``task``, whose peer is gone; by a deadlock of both if the peer has found one. Lock held."""
        self.lost_over = copy_error(error)
        words = self._waited[1].check(self._needs(task)) if self._waited and self._waited[0] is task else ""
        self._fail(task, DeadlockError(words) if words else error)

    def _rejected_error(self, task: Task | None, outcome: str) -> UnisonoError | None:
        """The error of a rejected message that no call has raised; ``outcome``: of ``task``, if it is not the one."""
        found = self.rejected.take() if self.rejected else None
        return MismatchError(f"{found[0]}. {outcome}") if found else None

    @abstractmethod
    def _on_rejected(self, task: Task) -> UnisonoError | None:
        """Handles a rejected message during a long wait for ``task``: it must not stay hidden. Lock held.

        Ends the call with the error, or returns it for the wait alone.
        """

    def _long_wait(self, task: Task) -> Wait:
        """Publishes a long wait for ``task``. Lock held."""
        here = call_site()
        if task.site is None:  # a synchronous call is made where it waits: recorded now, for later records
            task.site = here
            self._locate(task, here)
        return self.monitor.waits(partial(self.explain, task, "waits", placed=False), here)

    def _on_interrupt(self, task: Task, error: UnisonoError, held: bool) -> None:
        """Aborts the queue if the wait for ``task`` was interrupted and no Work of it is ``held``. Lock held."""
        if not held:
            self._abort(error)

    @abstractmethod
    def _needs(self, task: Task) -> list[Identity]:
        """The processes whose further calls ``task`` certainly needs to end. Lock held."""

    @abstractmethod
    def explain(self, task: Task, what: str, placed: bool = True) -> str:
        """Describes a call that did not end, with its site if ``placed``."""

    @abstractmethod
    def _late(self, task: Task, what: str) -> CollectiveTimeout:
        """The error of a call that did not end in time: the same, and what the ranks do that it waits for."""

    def poll(self, task: Task) -> bool:
        """Progresses the queue without waiting, unless the worker does; returns whether ``task`` is done."""
        if not task.done and not self.async_progress and not self.entered():
            try:  # as in `_progress_until`
                if self._lock.acquire(blocking=False):
                    self._run_progress(spin=False)
            finally:
                try:  # noqa: SIM105
                    self._lock.release()
                except RuntimeError:
                    pass
            self._notify_listeners()
        return task.done

    def listen(self, task: Task, listener: Callable[[Task], None]) -> None:
        """Calls ``listener(task)`` once the call is done, from the thread that completes it."""
        with self._marking:
            if waits := not task.done:
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
        """Runs the listeners of calls that are done; outside the lock, since they may issue calls."""
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
        """True if the worker has nothing to do here."""
        return bool(self._waiters) or self._closed or not self.busy()

    def work(self, check_at: float) -> float:
        """Progresses the calls, for the worker, and checks peers if it is time, ``check_at``.

        Returns the time of the next check. An error that nothing else catches ends the calls of this queue.
        """
        try:
            with self._lock:
                self._progress(spin=False)  # a worker that spins takes a part of the core from computation
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
    """The same for all queues of this process, and for listeners that another thread runs now."""
    return others_in_listeners() or any(queue._has_listeners() for queue in list(_queues))
