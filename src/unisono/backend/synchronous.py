"""Whether a message is waited for at once: torch's send and recv are isend and irecv, whose Work they wait for.

A backend is not told which of them was called. It matters: what nobody waits for needs a thread to carry it, and to
wake one costs more than a short message does. So the caller's frame is looked at.
"""

import inspect
import sys
from types import FrameType

import torch.distributed as dist

__all__ = ["waited_for"]

_WAITING = frozenset(inspect.unwrap(function).__code__ for function in (dist.send, dist.recv))
_DEPTH = 2  # frames of torch's from its send to the backend, at most


def waited_for(level: int = 3) -> bool:
    """Whether torch's send or recv has called the function ``level`` - 1 frames up, through its isend or irecv."""
    frame: FrameType | None = sys._getframe(level)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code in _WAITING:
            return True
        frame = frame.f_back
    return False
