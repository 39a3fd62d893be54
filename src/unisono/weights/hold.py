"""Holds: threads that read a version, and the thread that shows the next one, out of each other's way.

Readers share; a version that is ready waits for them, and readers that come meanwhile wait for it, so that neither
starves. A thread that holds may hold again.
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
        self._changed = threading.Condition()
        self._holders: Counter[int] = Counter()
        self._writing = False  # a version is being shown, or written in place
        self._writer = 0  # by this thread
        self._waiting = 0  # threads that want to write
        self._late: Callable[[], None] | None = None  # shown by the last holder, for its thread has stopped waiting

    @contextmanager
    def hold(self) -> Iterator[int | None]:
        """Nothing is shown within; yields the version. Raises `UsageError` in the thread that shows one."""
        me = threading.get_ident()
        with self._changed:
            if self._writing and self._writer == me:
                raise UsageError(
                    "hold was called in load or commit, in the thread that shows the version: leave it out"
                )
            while not self._holders[me] and (self._writing or self._waiting or self._late):
                self._changed.wait()
            self._holders[me] += 1
        try:
            yield self.version
        finally:
            self._release(me)

    def _release(self, me: int) -> None:
        with self._changed:
            self._holders[me] -= 1
            if not self._holders[me]:
                del self._holders[me]
            late = self._late if not self._holders else None
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

    def begin(self, deadline: float, late: Callable[[], None] | None = None) -> bool:
        """Waits until nobody holds, then keeps new holds waiting until `done`.

        Returns False at ``deadline``; ``late`` is then called when the last holder lets go.
        """
        with self._changed:
            self._waiting += 1
            try:
                while self._holders or self._writing:
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
        """Waits until the version that `begin` has left to the last holder is shown; False if it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._late is None and not self._writing, seconds)

    def done(self) -> None:
        """New holds may go on."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
