"""Keeps torch.compile out of the process group: a call breaks the graph and runs as plain Python.

``torch.compiler.disable`` says the same, but importing it costs every program more than two seconds. Its two marks are
set here by hand: one on the function, for tracing, and one on its code, for frames that Dynamo meets at run time; the
latter covers everything called from there.
"""

from types import FunctionType

from torch._C._dynamo import eval_frame

__all__ = ["keep_from_dynamo"]


def keep_from_dynamo(cls: type) -> None:
    """Marks every method of ``cls``."""
    skip = eval_frame._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(method.__code__, eval_frame._FrameExecStrategy(skip, skip))
