"""How long a lane's worker leaves calls to their callers.

Two threads that take turns at one call make it take twice as long where ranks outnumber cores. So the worker takes up
what nobody has come back for: not calls whose callers come now and then, and the later the more often callers have
carried theirs themselves. Whoever listens for the end of a call, as DDP does in C++, will not come: the worker hurries.
"""

from unisono.runtime.reentry import Flag

__all__ = ["Grace"]

_SHORTEST, _LONGEST = 0.0003, 0.005  # s
_TIMES = 8  # graces, at most, for a call whose caller comes for something else


class Grace:
    """``seconds``: how long the worker sleeps before it looks; ``rests``: whether it may wait to be woken instead.

    ``visits``: how often callers have left something to do, or come to do it.
    """

    def __init__(self) -> None:
        self.seconds, self.rests, self._left = _SHORTEST, False, _TIMES
        self.visits, self._listened = 0, Flag()

    def hurry(self) -> None:
        """Somebody listens for the end of a call."""
        self._listened.set()

    def sleep(self) -> tuple[bool, bool]:
        """Sleeps for a grace; whether somebody listens, and whether callers have visited meanwhile."""
        before = self.visits
        if listened := self._listened.wait(self.seconds):
            self._listened.clear()
        return listened, self.visits != before

    def over(self, idle: bool, visited: bool) -> bool:
        """After these seconds: whether the worker shall work, if it is ``idle`` or callers have ``visited`` since."""
        self.rests = idle and self.seconds == _LONGEST
        if idle:
            self.seconds, self._left = min(2 * self.seconds, _LONGEST), _TIMES
        elif visited and self._left:
            self._left -= 1
        else:
            self.seconds, self._left = _SHORTEST, _TIMES
            return True
        return False
