"""The worker of a queue: a thread that progresses calls without a waiter.

If cores are free for it (`CallQueue.async_progress`) it takes calls up at once: they go on while the caller computes.
It sleeps while it waits for peers. If ranks and their threads fill the cores it is only the fallback that keeps a call
without a waiter from blocking the others: two threads that take turns at one call make it take twice as long. So it
leaves calls alone whose callers come back now and then, and backs off for longer the more often callers have progressed
theirs themselves (`Backoff`). A listener, such as DDP's in C++, never waits: the worker takes its call up at once.
"""

import os
import threading
import weakref
from typing import Protocol

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.transport.layout import AFFINITY
from unisono.transport.process import OwnThread, affinity_mark
from unisono.transport.segment import Segment

__all__ = ["INLINE", "AsyncProgress", "Backoff", "Flag", "Worker"]

_SHORTEST, _LONGEST = 0.0003, 0.005  # s
_TIMES = 8  # backoffs, at most, for a call whose caller comes back for another one
INLINE = 256 * 1024
"""Bytes up to which a call of the background is tried at once even if a core is free for the worker."""
_sharers: dict[int, int] = {}  # of a set of cores, the most ranks of a group that have been seen to share it


class Flag:
    """A `threading.Event` that a thread may set while it is in the midst of setting it."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        """True if it is set."""
        return self._set

    def set(self) -> None:
        """Wakes the waiters."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Makes `wait` wait again."""
        self._set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is set, at most ``seconds``; returns whether it is set."""
        with self._changed:
            return self._changed.wait_for(self.is_set, seconds)


class Backoff:
    """The sleep of the worker, ``seconds``, before it progresses calls; if it ``rests`` it waits to be woken instead.

    ``visits``: the number of times callers have left a call or come back for one.
    """

    def __init__(self) -> None:
        self.seconds, self.rests, self._left = _SHORTEST, False, _TIMES
        self.visits, self._listened = 0, Flag()

    def hurry(self) -> None:
        """Ends the sleep: a call has a listener."""
        self._listened.set()

    def sleep(self) -> tuple[bool, bool]:
        """Sleeps once; returns whether `hurry` was called, and whether callers have visited meanwhile."""
        before = self.visits
        if listened := self._listened.wait(self.seconds):
            self._listened.clear()
        return listened, self.visits != before

    def over(self, idle: bool, visited: bool) -> bool:
        """Adapts the sleep to a queue that is ``idle`` or was ``visited``; returns whether to progress calls now."""
        self.rests = idle and self.seconds == _LONGEST
        if idle:
            self.seconds, self._left = min(2 * self.seconds, _LONGEST), _TIMES
        elif visited and self._left:
            self._left -= 1
        else:
            self.seconds, self._left = _SHORTEST, _TIMES
            return True
        return False


class _Queue(Protocol):
    async_progress: bool

    def idle(self) -> bool: ...

    def work(self, check_at: float) -> float: ...


class Worker:
    """A thread, started when it is first needed. While it rests it holds no reference to its queue."""

    def __init__(self, queue: _Queue, label: str) -> None:
        self._queue = weakref.ref(queue)
        self.backoff, self._label = Backoff(), label
        self._thread: threading.Thread | None = None
        self._there = Flag()  # there may be something to do
        self._starting = threading.RLock()
        self._ended = False

    def wake(self) -> None:
        """Starts or wakes the thread. Raises `UnisonoError` if none can be started."""
        self.backoff.visits += 1
        if self._there.is_set():
            return
        with self._starting:
            if self._thread is None and not self._ended:
                self._thread = OwnThread(target=self._run, name=f"unisono {self._label}", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    raise UnisonoError(
                        f"{self._label}: no thread to carry calls in the background: {error}; raise the limits of "
                        "its processes (ulimit -u) or container"
                    ) from error
        self._there.set()

    def remind(self) -> None:
        """Wakes the thread if it has been started."""
        if self._thread is not None:
            self._there.set()

    def end(self, wait: bool) -> None:
        """Ends the thread; ``wait``: until it has ended."""
        self._ended = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._there.set()
            if wait:
                thread.join(2.0)

    def _run(self) -> None:
        check_at = 0.0
        while not self._ended:
            self._there.wait()
            check_at = self._work(check_at)

    def _work(self, check_at: float) -> float:
        """Works off the queue; returns the time of the next check of peers."""
        queue = self._queue()
        if queue is None:
            return check_at
        if queue.async_progress:
            self._there.clear()
        elif not self._is_wanted(queue):
            return check_at
        while not queue.idle():
            check_at = queue.work(check_at)
        return check_at

    def _is_wanted(self, queue: _Queue) -> bool:
        """Sleeps for a backoff; returns True if no caller has come back for the calls of the queue."""
        backoff = self.backoff
        urgent, visited = backoff.sleep()
        works = backoff.over(queue.idle(), visited) or urgent
        if backoff.rests:
            self._there.clear()
            if not queue.idle():  # a call that came before this word was cleared
                self._there.set()
        return works


class AsyncProgress:
    """Asynchronous progress of calls beside computation: decided once all ranks of a group are there.

    ``UNISONO_ASYNC_PROGRESS`` 1 or 0 says so instead; raises `UsageError` for another value.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        wish = os.environ.get("UNISONO_ASYNC_PROGRESS", "")
        if wish not in ("", "0", "1"):
            raise UsageError(f"UNISONO_ASYNC_PROGRESS is {wish!r}, expected 0, 1, or nothing: by the free cores")
        self.on = wish == "1"
        self.decided = bool(wish)

    def decide(self) -> None:
        """Decides whether this rank has a core beyond those that its threads compute on; called until it is decided.

        Ranks that may use the same cores have equal shares of them.
        """
        longs, segment = self._segment.longs, self._segment
        marks = [longs[segment.field(rank, AFFINITY)] for rank in range(segment.layout.world_size)]
        if not all(marks):
            return
        mine, available = affinity_mark(), len(os.sched_getaffinity(0))
        sharers = _sharers[mine] = max(_sharers.get(mine, 1), marks.count(mine))
        threads = min(torch.get_num_threads(), available)
        self.on, self.decided = available >= sharers * (threads + 1), True
