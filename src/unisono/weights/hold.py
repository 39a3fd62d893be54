"""Holds: threads that read a version, and the thread that shows the next one, out of each other's way.

Readers share; a version that is ready waits for them, and readers that come meanwhile wait for it, so that neither
starves. A thread that holds may hold again. Ranks of one replica that hold parts of tensors show a version between the
same holds (together.py): a rank that has begun fewer than another one lets as many more begin first.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.errors import UsageError

__all__ = ["Holds"]


class Holds:
    """The holds of one replica's rank, and the version it shows."""

    def __init__(self) -> None:
        self.version: int | None = None
        """The version shown; None: none yet, or none that is whole."""
        self.begun = 0
        """Holds of threads since that version is shown."""
        self.used = False
        """True once a thread has held, or may."""
        self._changed = threading.Condition()
        self._holders: Counter[int] = Counter()
        self._writing = False  # a version is being shown, or written in place
        self._writer = 0  # by this thread
        self._waiting = 0  # threads that want to write
        self._paused = False  # new holds wait until it is known how many of them may begin
        self._until = 0  # so many may begin before the next version is shown
        self._late: Callable[[], None] | None = None  # shown by the last holder, for its thread has stopped waiting

    @contextmanager
    def hold(self, counts: bool = True) -> Iterator[int | None]:
        """Nothing is shown within; yields the version. Raises `UsageError` in the thread that shows one.

        ``counts``: as one of those that all ranks of a replica begin.
        """
        me = threading.get_ident()
        with self._changed:
            if self._writing and self._writer == me:
                raise UsageError(
                    "hold was called in load or commit, in the thread that shows the version: leave it out"
                )
            while not self._holders[me] and self._closed():
                self._changed.wait()
            if counts and not self._holders[me]:
                self.begun, self.used = self.begun + 1, True
            self._holders[me] += 1
        try:
            yield self.version
        finally:
            self._release(me)

    def _closed(self) -> bool:
        """True while new holds wait."""
        if self._writing:
            return True
        return bool(self._waiting or self._late or self._paused) and self.begun >= self._until

    def _release(self, me: int) -> None:
        with self._changed:
            self._holders[me] -= 1
            if not self._holders[me]:
                del self._holders[me]
            late = self._late if not self._holders and self.begun >= self._until else None
            if late is not None:
                self._late, self._writing, self._writer = None, True, me
            if not self._holders:
                self._changed.notify_all()
        if late is not None:
            try:
                late()
            finally:
                self.done()

    @property
    def mine(self) -> bool:
        """True if this thread holds."""
        return self._holders[threading.get_ident()] > 0

    @property
    def held(self) -> bool:
        """True if any thread holds."""
        return bool(self._holders)

    def pause(self) -> int:
        """Keeps new holds waiting until `begin` says how many may come; returns how many have begun."""
        with self._changed:
            self._paused, self._until = True, 0
            return self.begun

    def resume(self) -> None:
        """New holds need not wait any more."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def behind(self, until: int, seconds: float) -> bool:
        """Lets holds begin until there are ``until``; True if there are fewer ``seconds`` later."""
        with self._changed:
            self._until = until
            self._changed.notify_all()
            return not self._changed.wait_for(lambda: self.begun >= until, seconds)

    def begin(self, deadline: float, late: Callable[[], None] | None = None, until: int | None = None) -> bool:
        """Waits until nobody holds and ``until`` holds have begun, then keeps new holds waiting until `done`.

        Returns False at ``deadline``; ``late`` is then called when the last holder lets go.
        """
        with self._changed:
            self._waiting += 1
            self._until = self._until if until is None else until
            try:
                while self._holders or self._writing or self.begun < (until or 0):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._late = late
                        return False
                    self._changed.wait(min(left, 3600.0))
                self._writing, self._writer = True, threading.get_ident()
                return True
            finally:
                self._waiting -= 1
                self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Waits until the version that `begin` has left to the last holder is shown; False if it is not in time.

        Shows it if nobody holds any more, whatever the holds of other ranks.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._late is None and not self._writing, seconds):
                return True
            late = self._late if not (self._holders or self._writing) else None
            if late is None:
                return False
            self._late, self._writing, self._writer = None, True, threading.get_ident()
        try:
            late()
        finally:
            self.done()
        return True

    def shown(self, version: int) -> None:
        """This version is shown now."""
        self.version, self.begun = version, 0

    def done(self) -> None:
        """New holds may go on."""
        with self._changed:
            self._writing = self._paused = False
            self._until = 0
            self._changed.notify_all()
