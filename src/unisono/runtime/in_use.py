"""Memory in use: what may be done once its last user is done."""

import threading
from collections.abc import Callable

__all__ = ["InUse"]


class InUse:
    """Counts users of memory; calls a function once there are none."""

    def __init__(self) -> None:
        self._guard, self._users = threading.Lock(), 0
        self._then: Callable[[], None] | None = None

    def add(self) -> Callable[[], None]:
        """Counts one more, who calls what is returned once it is done."""
        with self._guard:
            self._users += 1
        return self.done

    def done(self) -> None:
        """Counts one less."""
        with self._guard:
            self._users -= 1
            then = self._then if not self._users else None
        if then is not None:
            then()

    def afterwards(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once there are none."""
        with self._guard:
            if self._users:
                self._then = then
                return
        then()
