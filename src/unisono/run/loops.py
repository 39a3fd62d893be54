"""When compiled loops (fused.py) are loaded: for programs that communicate enough, in the background, never in a call.

Importing numba takes a third of a second, compiling a dtype for the first time several seconds (kept on disk
afterwards, where the next process loads it in milliseconds). So a group begins with torch's operations; after `WARM`
calls a thread loads what the calls need, and the group changes over. ``UNISONO_FUSED=0`` never loads the loops,
``UNISONO_FUSED=now`` loads them with the first call that they serve, which waits. ``python -m unisono.run.loaded``
compiles all of them, so that no process has to: for images of containers.
"""

import fcntl
import importlib.util
import os
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from unisono.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["KINDS", "MESSAGES", "WARM", "Loops", "loops", "wanted"]

WARM = 200
"""Calls of a group before its loops are loaded: a program that makes fewer gains less than the loading takes, and has
no thread and no open files for it."""
MESSAGES = "messages"
KINDS = ("uint8", "float32", "float64", "uint16", "int16", "int32", "int64", MESSAGES)
"""What loops there are: collectives by numpy's name of a dtype (uint8 moves whatever it is; uint16 is bfloat16, int16
float16), and those of messages."""
_MODES = {"": 1, "0": 0, "1": 1, "now": 2}


class _User(Protocol):
    def change(self) -> None: ...


def wanted() -> int:
    """0: not to be used here; 1: once the group is warm; 2: at once. Raises `UsageError` for another value."""
    text = os.environ.get("UNISONO_FUSED", "")
    if text not in _MODES:
        raise UsageError(f"UNISONO_FUSED is {text!r}, expected 0 (never), 1 (once a group is warm) or now")
    return _MODES[text] if importlib.util.find_spec("numba") is not None else 0


class Loops:
    """The loops of this process: what is loaded, and the thread that loads more."""

    def __init__(self) -> None:
        self.fused: ModuleType
        self.messages: ModuleType
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # told when there is more
        self._ready: set[str] = set()
        self._asked: list[str] = []
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self.loading = threading.Lock()  # held while something is compiled: a fork waits for it

    def serve(self, kind: str, at_once: bool) -> bool:
        """Whether the loops of a kind are there; if not they will be, or, ``at_once``, are when this returns."""
        if kind in self._ready:
            return True
        if at_once:
            self._load(kind)
            return True
        with self._guard:
            if kind not in self._asked:
                self._asked.append(kind)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="unisono loads compiled loops")
                self._thread.start()
        return False

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._asked or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                kind = self._asked[0]
            self._load(kind)
            with self._guard:
                self._asked.remove(kind)
            for user in list(self.users):
                user.change()

    def _load(self, kind: str) -> None:
        """Compiles, or loads from disk; one process of this user compiles at a time, the others then load."""
        with (
            self.loading,
            open(os.path.join(tempfile.gettempdir(), f"unisono-compiles-{os.geteuid()}"), "w") as lock,
        ):
            from unisono.run import fused, fused_messages, fused_sums
            from unisono.transport.atomics import types

            fcntl.flock(lock, fcntl.LOCK_EX)
            word = types.intp
            if kind == MESSAGES:
                fused_messages.send.compile((word,) * 6)
                fused_messages.recv.compile((word,) * 6)
                fused_messages.nap.compile((word,) * 3)
                fused_messages.carry.compile((word,) * 4)
                self.messages = fused_messages
            else:
                sample = fused_sums.array_of(kind)
                fused.run.compile((*(word,) * 9, sample))
                fused.step.compile((*(word,) * 7, sample))
                self.fused = fused
            self._ready.add(kind)

    def forked(self) -> None:
        """In a forked child: the thread is the parent's."""
        self.loading.release()
        self._thread, self._guard = None, threading.Lock()
        self._asked.clear()


loops = Loops()
os.register_at_fork(before=loops.loading.acquire, after_in_parent=loops.loading.release, after_in_child=loops.forked)
