"""A wait that has become long: published for others to see, and searched for a deadlock. Never imports torch."""

import threading
from collections.abc import Callable, Sequence

from unisono.transport.process import Identity
from unisono.watch.deadlock import CycleFinder
from unisono.watch.page import Watch

__all__ = ["Vigil"]

_HARMLESS = ("tqdm", "rich")  # packages whose threads draw progress and communicate nothing


class Vigil:
    """One wait of this process: ``text`` says in what, ``reacts`` whether the end of a call may issue others."""

    def __init__(self, watch: Watch, text: str, reacts: Callable[[], bool]) -> None:
        self._watch, self._reacts = watch, reacts
        self._published = watch.begin(text)
        self._finder = CycleFinder(watch)

    def look(self, needs: Sequence[Identity]) -> str:
        """Publishes what the wait needs now; words on a deadlock, if it is in one."""
        if not self._published:
            return ""
        self._watch.look([] if _others() or self._reacts() else needs)
        return self._finder.look()

    def end(self) -> None:
        """The wait is over."""
        if self._published:
            self._watch.end()


def _others() -> bool:
    """Whether another thread than the waiting one could issue calls."""
    threads = [
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith("unisono") and type(thread).__module__.partition(".")[0] not in _HARMLESS
    ]
    return len(threads) != 1
