"""A wait that has become long: published for others to see, and searched for a deadlock. Never imports torch."""

from collections.abc import Callable, Sequence

from unisono.transport.process import Identity
from unisono.watch.deadlock import CycleFinder
from unisono.watch.page import Watch
from unisono.watch.threads import others_could_call

__all__ = ["Vigil"]


class Vigil:
    """One wait of this process: ``text`` says in what, ``reacts`` whether the end of a call may issue others."""

    def __init__(self, watch: Watch, text: Callable[[], str], reacts: Callable[[], bool]) -> None:
        self._watch, self._text, self._reacts = watch, text, reacts
        self._said = text()
        self._published = watch.begin(self._said)
        self._finder = CycleFinder(watch)

    def look(self, needs: Sequence[Identity]) -> str:
        """Publishes what the wait needs now; words on a deadlock, if it is in one."""
        if not self._published:
            return ""
        if (text := self._text()) != self._said:
            self._said = text
            self._watch.say(text)
        self._watch.look([] if others_could_call() or self._reacts() else needs)
        return self._finder.look()

    def end(self) -> None:
        """The wait is over."""
        if self._published:
            self._watch.end()
