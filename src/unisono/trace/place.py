"""The line of the program that a call came from; the program may be unisono's own. Never imports torch."""

import os
import sys
from types import FrameType

import unisono
from unisono.runtime.call_site import Site, is_inner, is_standard

__all__ = ["place"]

_ROOT = os.path.dirname(os.path.abspath(unisono.__file__)) + os.sep
_PROGRAMS = (f"{_ROOT}train{os.sep}", f"{_ROOT}bench{os.sep}")


def place() -> Site:
    """The nearest frame of a program, else the nearest that is neither torch's nor unisono's.

    `unisono train` and `unisono bench` are programs; what starts their processes, as multiprocessing does anybody's, is
    none.
    """
    frame: FrameType | None = sys._getframe(1)
    outer: Site = ("", 0, "")
    while frame is not None:
        file = frame.f_code.co_filename
        inner = is_inner(file)
        if file.startswith(_PROGRAMS) or not (inner or is_standard(file)):
            return file, frame.f_lineno, frame.f_code.co_name
        if not (inner or outer[0]):
            outer = file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return outer
