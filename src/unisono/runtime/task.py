"""A call under way, as the lane that carries it knows it."""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.transport.futex import LINGER
from unisono.watch.call import Call, Site, site_text

if TYPE_CHECKING:
    from unisono.runtime.lane import Lane

__all__ = ["BRIEFLY", "Access", "Task", "brief", "others_tell", "tell", "telling"]

BRIEFLY, _SLOWLY = 2e-5, 2.5e-10  # s, s per byte


class Task:
    """One call under way: what was asked, the outcome."""

    __slots__ = ("call", "deadline", "done", "error", "issued", "listeners", "outputs", "site")

    def __init__(self, call: Call, outputs: list[Any], timeout: float) -> None:
        self.call, self.outputs = call, outputs
        self.site: Site | None = None  # where it was issued, if that is not on the stack any more
        self.issued = time.monotonic()
        self.deadline = self.issued + timeout
        self.done = False
        self.error: BaseException | None = None
        self.listeners: list[Callable[[Task], None]] = []

    def place(self) -> str:
        """``, at file:line in function,``: where it was issued, within a sentence; empty if that is not known."""
        return f", at {site_text(self.site)}," if self.site is not None and self.site[0] else ""


class Access:
    """The way to a lane until that is closed: a Work that is kept for longer does not keep the group's memory."""

    __slots__ = ("lane",)

    def __init__(self, lane: "Lane") -> None:
        self.lane: Lane | None = lane


def brief(call: Call) -> float:
    """Seconds that a call in the background may wait for its peers at once: about what its data takes to move."""
    return min(LINGER, BRIEFLY + _SLOWLY * call.nbytes)


class _Telling(threading.local):
    on = False  # while this thread runs listeners


_telling = _Telling()
_tellers: set[int] = set()  # threads for which it is


def telling() -> bool:
    """Whether this thread runs a listener: its calls are not left to the background."""
    return _telling.on


def tell(task: Task) -> None:
    """Runs the listeners of a call that is done."""
    before, me = telling(), threading.get_ident()
    _tellers.add(me)
    _telling.on = True
    try:
        for listener in task.listeners:
            listener(task)
    finally:
        _telling.on = before
        if not before:
            _tellers.discard(me)


def others_tell() -> bool:
    """Whether another thread than this one runs listeners, which may issue calls."""
    return bool(_tellers - {threading.get_ident()})


os.register_at_fork(after_in_child=_tellers.clear)
