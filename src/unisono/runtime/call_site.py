"""Call sites: the user's line that a call came from. Never imports torch."""

import os
import sys
import threading
from importlib.util import find_spec
from types import FrameType

__all__ = ["Site", "call_site", "from_here", "interrupted_site", "is_inner", "is_standard", "raised_at", "site_text"]

Site = tuple[str, int, str]
"""The site of a call: file, line, function."""

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _torch_folder() -> str:
    """The folder of torch; found without importing it."""
    spec = find_spec("torch")
    return os.path.dirname(os.path.abspath(spec.origin)) + os.sep if spec is not None and spec.origin else "<no torch>"


_INNER = (
    _HERE,
    _torch_folder(),
    "<frozen",
    "<string>",
    _LIBRARY + "contextlib.py",
    _LIBRARY + "threading.py",
    _LIBRARY + "functools.py",
    _LIBRARY + "warnings.py",
    os.path.dirname(_torch_folder().rstrip(os.sep)) + os.sep + "typing_extensions.py",  # torch's deprecated functions
)


def is_inner(file: str) -> bool:
    """True if a file's code is torch's, unisono's or glue of the standard library: never a call site."""
    return file.startswith(_INNER)


def is_standard(file: str) -> bool:
    """True if a file belongs to Python's standard library, beside which packages may be installed."""
    return file.startswith(_LIBRARY) and "-packages" + os.sep not in file


def call_site() -> Site:
    """The user's nearest line. A thread that is not the main one is named beside its function.

    On a thread that only has a library's function to call (an executor's, say) that is the line of the main thread, for
    the giver of the function is not known.
    """
    file, line, function = _users(sys._getframe(1))
    me, main = threading.get_ident(), threading.main_thread().ident
    if me == main:
        return file, line, function
    thread = next((f"thread {thread.name}" for thread in threading.enumerate() if thread.ident == me), f"thread {me}")
    if file:
        return file, line, f"{function} ({thread})"
    file, line, function = _users(sys._current_frames().get(main or 0))
    return file, line, f"{function} of the main thread (called by {thread})" if file else thread


def _users(frame: FrameType | None) -> Site:
    """The nearest line on a stack that is neither `is_inner` nor `is_standard`; an empty one if there is none."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_INNER) and not is_standard(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "", 0, ""


def interrupted_site() -> Site:
    """As `call_site`, of the call that was under way when what calls now, a signal handler or finalizer, began."""
    frame: FrameType | None = sys._getframe(1)
    inner, changes = True, 0
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_INNER) is not inner:
            inner, changes = not inner, changes + 1
            if changes == 3:  # from this code to the handler's, to what it interrupted, to whose call that is
                return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "", 0, ""


def raised_at(error: BaseException) -> Site | None:
    """The last line of the user's on the way to where an exception was raised; None if there is none."""
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not is_inner(code.co_filename) and not is_standard(code.co_filename):
            found = code.co_filename, step.tb_lineno, code.co_name
        step = step.tb_next
    return found


def site_text(site: Site) -> str:
    """``file:line in function``, the file relative to the working directory if it lies below it."""
    file, line, function = site
    if not file:
        return f"no user code on the stack{f' of {function}' if function else ''}"
    return f"{from_here(file)}:{line} in {function}"


def from_here(path: str) -> str:
    """A path relative to the working directory if it lies below it; unchanged too if that directory is gone."""
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except OSError:
        return path
