"""Tensors that outlive the call that made them: made in `torch.inference_mode` they could never be written outside.

What serves a group, or a call until it is done, is made and used outside that mode, whatever the caller's.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_inference", "plain"]

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


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory outside autograd and inference mode, writable by any code; writes do not count as a new version.

    To be called `outside_inference`.
    """
    if not tensor.is_inference():
        return tensor.data
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias = alias.conj() if tensor.is_conj() else alias
    return alias._neg_view() if tensor.is_neg() else alias
