"""The loader of compiled loops: at the first call, or, if they must be compiled, in the background.

Loading what lies on disk (object_code.py) takes hundredths of a second; the first call that it serves waits for that.
Compiling a dtype takes seconds. So where nothing is kept yet a group begins with torch's operations; after
`COMPILE_AFTER` calls a thread compiles what the calls need, for other processes as well, and the group changes over.
``UNISONO_FUSED=0`` never uses the loops, ``UNISONO_FUSED=now`` waits even for compiling. ``python -m
unisono.runtime.loaded`` compiles all of them, so that no process has to: for images of containers.
"""

import fcntl
import functools
import importlib.util
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

from unisono.errors import UsageError
from unisono.transport.process import OwnThread

__all__ = ["CHECKSUM", "COMPILE_AFTER", "KINDS", "MESSAGES", "Loops", "loops", "wanted"]

COMPILE_AFTER = 200
"""Calls of a group before its loops are compiled: a program that makes fewer would gain less than that takes."""
MESSAGES, CHECKSUM = "messages", "checksum"
KINDS = ("uint8", "float32", "float64", "uint16", "int16", "int32", "int64", MESSAGES, CHECKSUM)
"""The kinds of loops: collectives by numpy's name of a dtype (uint8 moves whatever it is; uint16 is bfloat16, int16
float16), those of messages, and that of checksums."""
_MODES = {"": 1, "0": 0, "1": 1, "now": 2}


def wanted() -> int:
    """0: never, or not here; 1: once they are compiled; 2: at once. Raises `UsageError` for another value."""
    text = os.environ.get("UNISONO_FUSED", "")
    if text not in _MODES:
        raise UsageError(f"UNISONO_FUSED is {text!r}, expected 0 (never), 1 (as soon as they are compiled) or now")
    return _MODES[text] if _has_numba() else 0


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _object_code() -> Any:
    """The module that needs llvmlite."""
    from unisono.runtime import object_code

    return object_code


def _compile(kind: str) -> bytes:
    """The object code of the loops of a kind, which is also kept."""
    from unisono.runtime import compiled
    from unisono.runtime.checksum_loop import checksum_loops

    made = checksum_loops() if kind == CHECKSUM else compiled.loops_of(None if kind == MESSAGES else kind)
    code = compiled.compiled(kind, made)
    _object_code().keep(kind, code)
    return code


class Loops:
    """The loops of this process: what is loaded, and the thread that compiles more."""

    def __init__(self) -> None:
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # words when there is more
        self._ready: dict[str, dict[str, Callable[..., int]]] = {}
        self._searched: set[str] = set()
        self._requested: list[str] = []
        self._failed: set[str] = set()
        self._thread: threading.Thread | None = None
        self._guard = threading.RLock()
        self.loading = threading.Lock()  # held while something is compiled: a fork waits for it

    def kept(self, kind: str) -> bool:
        """True if the loops of a kind are there: in this process or, when this was first asked, on disk."""
        if kind not in self._ready and kind not in self._searched and self.loading.acquire(blocking=False):
            try:
                self._searched.add(kind)
                self._take(kind, _object_code().kept(kind))
            finally:
                self.loading.release()
        return kind in self._ready

    def of(self, kind: str) -> dict[str, Callable[..., int]]:
        """The loops of a kind, by name; see compiled.py. `serve` has said they are there."""
        return self._ready[kind]

    def serve(self, kind: str, at_once: bool) -> bool:
        """True if the loops of a kind are there; if not they will be, or, ``at_once``, are when this returns."""
        if kind in self._ready:
            return True
        if at_once:
            self._load(kind)
            return True
        with self._guard:
            if kind not in self._requested and kind not in self._failed:
                self._requested.append(kind)
            if self._thread is None and self._requested:
                self._thread = OwnThread(target=self._work, name="unisono compiles loops")
                self._thread.start()
        return False

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._requested or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                kind = self._requested[0]
            try:
                self._load(kind)
            except Exception as error:
                self._failed.add(kind)
                words = "torch's operations go on without compiled loops for %s: %s: %s"
                logging.getLogger("unisono").warning(words, kind, type(error).__name__, error)
            with self._guard:
                self._requested.remove(kind)
            for user in list(self.users):
                user.notify()

    def _load(self, kind: str) -> None:
        """Loads the loops of a kind. If they must be compiled, one process of this user does so at a time."""
        with self.loading:
            if kind in self._ready:
                return
            code = _object_code().kept(kind)
            if code is None:
                with open(os.path.join(tempfile.gettempdir(), f"unisono-compiles-{os.geteuid()}"), "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    code = _object_code().kept(kind) or _compile(kind)
            self._take(kind, code)

    def _take(self, kind: str, code: bytes | None) -> None:
        if code is not None:
            self._ready[kind] = _object_code().functions(kind, code)

    def forked(self) -> None:
        """In a forked child: the thread is the parent's."""
        self.loading.release()
        self._thread, self._guard = None, threading.RLock()
        self._requested.clear()


loops = Loops()
os.register_at_fork(before=loops.loading.acquire, after_in_parent=loops.loading.release, after_in_child=loops.forked)
