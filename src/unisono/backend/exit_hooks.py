"""Hooks that publish a process's exit note to the ranks that wait for it, however it ends.

An uncaught exception is quoted to the others; a normal end says that it was one. ``multiprocessing`` children end by
``os._exit`` after their finalizers, without ``sys.excepthook`` and ``atexit``, so the same is hooked in there.

Python waits for threads before it calls what ``atexit`` knows. A rank whose main thread has ended by an exception does
not come any more, however long a thread of its own keeps the process alive; so that is said before that wait. After a
normal end threads may still communicate, and nothing is said until they are done.

``sys.excepthook`` may be replaced after ours (by rich, by a user's own) without a call of it. But before any hook is
called Python notes the exception in ``sys``, where debuggers and test runners note those that they have caught as well.

Once it has said so, a process that may be failing over lost peers stays until they have ended (see
``unisono.watch.exit_notes``). Whether the program ends by ``sys.exit(1)`` nobody is told; of a ``multiprocessing``
child it is known.
"""

import atexit
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from unisono.backend import patches
from unisono.runtime.call_site import raised_at, site_text
from unisono.watch import exit_notes
from unisono.watch.exit_notes import short

__all__ = ["call_at_exit"]

_QUOTED = 1000  # characters of an exception's text

_leave_note: Callable[[str], None] | None = None
_words = ""


def _quote(error: BaseException | None) -> str:
    """The exception as the others will read it; a ``sys.exit`` inside a handler speaks of the handled one."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    if error is None or isinstance(error, SystemExit):
        return ""
    text, site = " ".join(str(error).split()), raised_at(error)
    words = f"ended by {type(error).__name__}" + (f": {short(text, _QUOTED)}" if text else "")
    return f"{words}, at {site_text(site)}" if site and site_text(site) not in text else words


def _uncaught() -> BaseException | None:
    """The exception that ended the program, although another hook than ours was told: no frame could have caught it."""
    error = getattr(sys, "last_value", None)
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_back is None else None


def _uncaught_now(error: BaseException) -> None:
    global _words
    _words = _quote(error)
    exit_notes.put_off()


def _exit_words() -> str:
    return _words or _quote(_uncaught())


def call_at_exit(leave_note: Callable[[str], None]) -> None:
    """Calls ``leave_note(words)`` once at exit; ``words`` quote an uncaught exception, else are empty."""
    global _leave_note
    if _leave_note is not None:
        _leave_note = leave_note
        return
    _leave_note = leave_note
    patches.call_before_excepthook(_uncaught_now)
    atexit.register(_end)
    multiprocessing.util.Finalize(None, _end_child, exitpriority=100)
    before_threads = getattr(threading, "_register_atexit", None)  # what concurrent.futures ends its threads by
    if before_threads is not None:
        before_threads(_end_if_failed)


def _note_once() -> None:
    global _leave_note
    if _leave_note is not None:
        leave_note, _leave_note = _leave_note, None
        leave_note(_exit_words() or _quote(sys.exc_info()[1]))


def _end_if_failed() -> None:
    if _exit_words():
        _end()


def _end() -> None:
    _note_once()
    with suppress(BaseException):  # a signal's: enough of it
        exit_notes.stay()


def _end_child() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        _note_once()
    else:
        _end()


def _forked() -> None:
    """In a forked child the parent's groups are not this process's to take leave of; new ones listen anew."""
    global _leave_note, _words
    _leave_note, _words = None, ""


os.register_at_fork(after_in_child=_forked)
