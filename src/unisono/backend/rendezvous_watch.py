"""A line in the log where ranks do not find each other, seconds after they began to, not at the timeout.

torch's rendezvous waits for all ranks without a word, for half an hour by default. The wait itself is left alone: hosts
may be started one after the other. Its error at the timeout counts ranks; here it names them.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from unisono.errors import CollectiveTimeout, first_line
from unisono.units import name_ranks

__all__ = ["ABSENT_SECONDS", "await_folder", "for_our_group", "log_absent", "not_met", "watched"]

ABSENT_SECONDS = 8.0
_CONNECT_SECONDS, _PAUSE, _LATER_PAUSE = 1.5, 0.5, 5.0
_FRAMES = 16
_log = logging.getLogger("unisono")
_met: "weakref.ref[Any] | None" = None  # the store of the last rendezvous


def for_our_group() -> bool:
    """True if the caller is torch's `init_process_group`, for unisono: a rendezvous is told nothing of the backend."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "init_process_group":
            return "unisono" in str(frame.f_locals.get("backend"))
    return False


def watched(met: Iterator[tuple[Any, int, int]]) -> Iterator[tuple[Any, int, int]]:
    """torch's rendezvous ``met``, with a line in the log if it takes long; its error names who is missing."""
    global _met
    watch = _Watch()
    watch.start()
    try:
        store, rank, world_size = next(met)
    except RuntimeError as error:
        if words := watch.absent_words():
            raise type(error)(f"{first_line(error)} {words}") from None
        raise
    finally:
        watch.over.set()
    _met = weakref.ref(store)
    store.set(_key(rank), socket.gethostname())  # rank 0 may still wait, in torch
    yield store, rank, world_size
    yield from met


def await_folder(url: str, timeout: timedelta | None) -> None:
    """Returns once the folder of a ``file://`` rendezvous exists; raises `CollectiveTimeout`.

    torch's FileStore waits for it too, but for minutes, whatever the timeout, with Python's lock held: deaf to Ctrl-C.
    """
    path, begun, logged = urlsplit(url).path, time.monotonic(), False
    limit = timeout.total_seconds() if timeout is not None else math.inf
    missing = (
        f"{os.path.dirname(path)}, the folder of init_method file://{path}, does not exist on {socket.gethostname()}"
    )
    while not os.path.isdir(os.path.dirname(path) or "/"):
        waited = time.monotonic() - begun
        if waited > limit:
            raise CollectiveTimeout(f"{missing}: it did not come within {limit:g} s")
        if waited > ABSENT_SECONDS and not logged:
            logged = True
            _log.warning("%s: make it, where all ranks see it. This rank waits for it", missing)
        time.sleep(0.02)


def not_met(absent: Sequence[int]) -> list[int]:
    """Those of the ``absent`` ranks that are not in torch's rendezvous either. Raises `RuntimeError`: the store's."""
    store = _met() if _met is not None else None
    return [rank for rank in absent if store is None or not store.check([_key(rank)])]


def log_absent(me: str, absent: Sequence[int], seconds: float) -> None:
    """Logs that ``absent`` ranks have not come to the default group; ``me`` names this one."""
    _log.warning(
        "%s: %s did not come within %g s: start them, with the same address, port and world size. It waits on; "
        "`unisono doctor` on all hosts finds the cause",
        *(me, name_ranks(absent), seconds),
    )


def _key(rank: int) -> str:
    """Of a rank in the store where all meet; torchrun keeps one store over all attempts."""
    return f"unisono/rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


class _Watch(threading.Thread):
    """Announces this rank beside torch's rendezvous, once that takes long, and logs who else has come."""

    def __init__(self) -> None:
        super().__init__(name="unisono watches the rendezvous", daemon=True)
        self.over = threading.Event()
        self._address, self._port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        self._rank, self._size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        self._store: Any = None
        self._why = "not tried"
        self._absent: list[int] = []  # when last looked
        self._ended = ""

    def run(self) -> None:
        deadline, pause = time.monotonic() + ABSENT_SECONDS, _PAUSE
        while not self.over.wait(pause):
            if self._store is None and self._given():
                self._connect()
            if self._store is not None:
                self._look()
            if pause == _PAUSE and time.monotonic() >= deadline:
                _log.warning("%s", self._words())
                pause = _LATER_PAUSE

    def absent_words(self) -> str:
        """Who has not come to the store, when last looked; empty if that is not known."""
        remedy = "start them, with this address, port and WORLD_SIZE"
        return f"{name_ranks(self._absent)} did not come to {self._place()}: {remedy}" if self._absent else ""

    def _look(self) -> None:
        try:
            self._absent = [k for k in range(int(self._size)) if not self._store.check([_key(k)])]
        except RuntimeError as error:
            self._ended = first_line(error)

    def _place(self) -> str:
        return f"rank 0's store at MASTER_ADDR {self._address}, port {self._port}"

    def _given(self) -> bool:
        return bool(self._address) and all(text.isdecimal() for text in (self._port, self._rank, self._size))

    def _connect(self) -> None:
        """Tries a plain connection first: torch's store logs pages where it fails."""
        from torch._C._distributed_c10d import TCPStore

        try:
            socket.create_connection((self._address, int(self._port)), _CONNECT_SECONDS).close()
            limit = timedelta(seconds=_CONNECT_SECONDS)
            self._store = TCPStore(self._address, int(self._port), None, False, limit, wait_for_workers=False)
            self._store.set(_key(int(self._rank)), socket.gethostname())
        except TimeoutError:
            self._why = "timed out"
        except OSError as error:
            self._why = (error.strerror or str(error)).lower()
        except RuntimeError as error:
            self._why = first_line(error)

    def _words(self) -> str:
        me = f"rank {self._rank or '?'} of {self._size or '?'} (pid {os.getpid()} on {socket.gethostname()})"
        late = f"within {ABSENT_SECONDS:g} s"
        if not self._given():
            return f"{me}: the other ranks have not come {late}: are all started?"
        place = self._place()
        if self._store is None:
            return (
                f"{me} can not reach {place} ({self._why}): is rank 0 started there, and the port open? It goes on "
                "trying; `unisono doctor` on all hosts finds the cause"
            )
        if self._ended:
            return f"{me}: {place} does not answer any more ({self._ended})"
        who = name_ranks(self._absent) if self._absent else "a rank that has the number of another one"
        return (
            f"{me}: {who} did not come to {place} {late}: start them, with this address, port and WORLD_SIZE. It waits "
            "on; `unisono doctor` on all hosts finds the cause"
        )
