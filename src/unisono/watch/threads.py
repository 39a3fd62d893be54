"""The other threads of a process that waits: which of them could issue a call. Never imports torch.

A thread that could not is one of the library's own, one that another library keeps for a purpose of its own, or an
executor's that has no work: only another thread could give it some.
"""

import os
import sys
import threading
import time
from types import FrameType

__all__ = ["OwnThread", "others_could_call"]

_HARMLESS = (
    "logging.handlers.",
    "multiprocessing.queues.",  # feeds a queue's pipe; every DataLoader with workers has some
    "multiprocessing.resource_sharer.",
    "rich.",
    "tensorboard.",
    "tensorboardX.",
    "torch._inductor.",
    "torch.utils.data._utils.pin_memory.",
    "tqdm.",
    "wandb.",
)
"""Modules and packages whose threads write, draw or fetch, and communicate nothing."""
_GONE = 0.1  # s: how long the system may take to end a thread that has ended its Python


class OwnThread(threading.Thread):
    """A thread of the library itself, which issues no calls of its own accord."""

    def join(self, timeout: float | None = None) -> None:
        """As `Thread.join`; after that the thread is gone from the system, too, which takes some microseconds more."""
        super().join(timeout)
        limit = time.monotonic() + _GONE
        while not self.is_alive() and os.path.exists(f"/proc/self/task/{self.native_id}") and time.monotonic() < limit:
            os.sched_yield()


def others_could_call() -> bool:
    """Whether another thread than this one could issue calls."""
    frames, threads = sys._current_frames(), threading.enumerate()
    me = threading.get_ident()
    del frames[me]  # a frame that refers to itself would keep all of this stack's variables
    own = {thread.ident for thread in threads if isinstance(thread, OwnThread)}
    others = {thread.ident for thread in threads} | frames.keys()  # threading does not know those of other languages
    return not all(_harmless(frames.get(ident or 0)) for ident in others - own - {me})


def _harmless(frame: FrameType | None) -> bool:
    """Whether the thread that is in ``frame`` could not issue a call; None: it runs no Python, and nothing is known."""
    return frame is not None and (_idle(frame) or f"{_root(frame)}.".startswith(_HARMLESS))


def _root(frame: FrameType) -> str:
    """The module of the function that a thread was made for."""
    module = ""
    at: FrameType | None = frame
    while at is not None:
        name = at.f_globals.get("__name__", "")
        module = module if name == "threading" else name
        at = at.f_back
    return module


def _idle(frame: FrameType) -> bool:
    """Whether it is a ThreadPoolExecutor's thread that waits for work, and there is none."""
    if frame.f_globals.get("__name__") != "concurrent.futures.thread" or frame.f_code.co_name != "_worker":
        return False
    queue = frame.f_locals.get("work_queue")
    return queue is not None and bool(queue.empty())
