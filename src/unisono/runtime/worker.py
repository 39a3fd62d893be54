"""The worker of a lane: a thread that carries calls which nobody waits for.

Where cores are free for it (`Lane.ahead`) it takes calls up at once: they go on while the caller computes. It sleeps
while it waits for peers. Where ranks and their threads fill the cores it is only the fallback that keeps an
un-waited call from blocking the others (grace.py): two threads that take turns at one call would make it slower.
"""

import threading
import weakref
from typing import Protocol

from unisono.errors import UnisonoError
from unisono.runtime.grace import Grace
from unisono.runtime.reentry import Flag
from unisono.watch.threads import OwnThread

__all__ = ["Worker"]


class _Lane(Protocol):
    ahead: bool

    def idle(self) -> bool: ...

    def work(self, look: float) -> float: ...


class Worker:
    """Started when it is first needed. While it rests it does not keep its lane, which may go with its group."""

    def __init__(self, lane: _Lane, grace: Grace, label: str) -> None:
        self._lane = weakref.ref(lane)
        self._grace, self._label = grace, label
        self._thread: threading.Thread | None = None
        self._there = Flag()  # there may be something to do
        self._starting = threading.RLock()
        self._ended = False

    def wake(self) -> None:
        """There is something to do. Raises `UnisonoError` if no thread can be started for it."""
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
        """The same, for a worker that has been started."""
        if self._thread is not None:
            self._there.set()

    def end(self, wait: bool) -> None:
        """The lane is closed; ``wait``: for the thread to end."""
        self._ended = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._there.set()
            if wait:
                thread.join(2.0)

    def _run(self) -> None:
        look = 0.0
        while not self._ended:
            self._there.wait()
            look = self._work(look)

    def _work(self, look: float) -> float:
        """What there is to do; returns when to look around next."""
        lane = self._lane()
        if lane is None:
            return look
        if lane.ahead:
            self._there.clear()
        elif not self._is_wanted(lane):
            return look
        while not lane.idle():
            look = lane.work(look)
        return look

    def _is_wanted(self, lane: _Lane) -> bool:
        """Sleeps for a grace; whether nobody has come back for what there is."""
        grace = self._grace
        urgent, visited = grace.sleep()
        works = grace.over(lane.idle(), visited) or urgent
        if grace.rests:
            self._there.clear()
            if not lane.idle():  # a call that came before this word was cleared
                self._there.set()
        return works
