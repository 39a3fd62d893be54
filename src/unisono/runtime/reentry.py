"""What interrupts a thread in the midst of a call: a signal handler or a finalizer, and what either may do then.

Python runs both between any two steps of whatever the thread is in, so one that calls unisono may come upon a lane that
the call it interrupts, below it on the same stack, holds and will not let go before it returns. No wait could end: such
a call is refused. Leaving the group is not, for a program that is told to end (SIGTERM) ends like that.
"""

import threading

from unisono.errors import UnisonoError, UsageError
from unisono.watch.farewell import first_line
from unisono.watch.site import call_site, interrupted_site, site_text

__all__ = ["Flag", "interruption", "reentered"]


def reentered(what: str, label: str) -> UsageError:
    """The error of a call, ``what``, of the group called ``label`` in the midst of another one of this thread."""
    return UsageError(
        f"{what} at {site_text(call_site())} interrupts a call of {label} at {site_text(interrupted_site())}: a signal "
        "handler or a finalizer can not communicate then; set a flag in it, and act on that outside"
    )


def interruption(error: BaseException) -> UnisonoError:
    """What a call ends with that an exception from elsewhere has broken off: Ctrl-C, or a signal handler's."""
    words = first_line(error)
    return UnisonoError(f"{type(error).__name__} interrupted a call under way" + (f": {words}" if words else ""))


class Flag:
    """A `threading.Event` that a thread may set while it is in the midst of setting it."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Wakes whoever waits."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """From now on `wait` waits."""
        self._set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is set, or for ``seconds``; whether it is set."""
        with self._changed:
            return self._changed.wait_for(self.is_set, seconds)
