"""Hooks that publish a process's exit note to the ranks that wait for it, however it ends.

The note quotes an uncaught exception, or says that the end was a normal one. ``multiprocessing`` children end by
``os._exit`` after their finalizers, without ``sys.excepthook`` and ``atexit``, so they have a hook of their own.

Python waits for threads before it runs ``atexit`` hooks. A rank whose main thread has ended by an exception makes no
further call, however long a thread of its own keeps the process alive; so its note is published before that wait. After
a normal end threads may still communicate, and the note is published when they are done.

``sys.excepthook`` may be replaced after ours (by rich, by a user's own) without a call of it. But before any hook is
called Python stores the exception in ``sys``, where debuggers and test runners store those that they have caught, too.

After its note, a process that may be failing over lost peers stays until they have ended (see
``unisono.watch.exit_notes``). The note can not say whether the program ends by ``sys.exit(1)``, except of a
``multiprocessing`` child.
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
    """The exception in words for the peers; for a ``sys.exit`` inside a handler, the handled one."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    if error is None or isinstance(error, SystemExit):
        return ""
    text, site = " ".join(str(error).split()), raised_at(error)
    words = f"ended by {type(error).__name__}" + (f": {short(text, _QUOTED)}" if text else "")
    return f"{words}, at {site_text(site)}" if site and site_text(site) not in text else words


def _uncaught() -> BaseException | None:
    """The exception that ended the program, even if another hook was called: no frame could have caught it."""
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
    with suppress(BaseException):  # of a signal handler: the wait ends
        exit_notes.stay()


def _end_child() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        _note_once()
    else:
        _end()


def _forked() -> None:
    """Forgets the hook in a forked child: the groups are the parent's; new ones register again."""
    global _leave_note, _words
    _leave_note, _words = None, ""


os.register_at_fork(after_in_child=_forked)
