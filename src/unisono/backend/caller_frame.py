"""The frames of a process group's methods: kept from torch.compile, and read to find the caller.

torch calls the same method for send as for isend, and for recv as for irecv. The difference matters: an isend needs a
thread to progress it, and waking one costs more than a short message does. So the caller's frame is read.
"""

import inspect
import sys
from types import FrameType, FunctionType

import torch.distributed as dist
from torch._C._dynamo import eval_frame

__all__ = ["keep_from_dynamo", "waited_for"]

_SEND, _RECV = (inspect.unwrap(function).__code__ for function in (dist.send, dist.recv))
_DEPTH = 2  # frames of torch's from its send to the backend, at most


def keep_from_dynamo(cls: type) -> None:
    """Marks every method of ``cls``: a call breaks the graph and runs as plain Python.

    ``torch.compiler.disable`` says the same, but importing it costs every program more than two seconds. Its two marks
    are set here by hand: one on the function, for tracing, and one on its code, for frames that Dynamo meets at run
    time; the latter covers everything called from there.
    """
    skip = eval_frame._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(method.__code__, eval_frame._FrameExecStrategy(skip, skip))


def waited_for(level: int = 3) -> bool:
    """Returns True if torch's send or recv called the function ``level`` - 1 frames up, through isend or irecv."""
    frame: FrameType | None = sys._getframe(level)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        code = frame.f_code
        if code is _SEND or code is _RECV:  # a set would hash all of its code
            return True
        frame = frame.f_back
    return False
