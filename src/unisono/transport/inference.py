"""Tensors that outlive the call that made them: made in `torch.inference_mode` they could never be written outside.

What serves a group, or a call until it is done, is made and used outside that mode, whatever the caller's.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_inference"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_inference(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, run outside `torch.inference_mode`; to ask costs a tenth of what to leave the mode does."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run
