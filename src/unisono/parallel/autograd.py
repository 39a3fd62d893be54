"""The one call of torch.autograd that its types leave open."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["apply"]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """The tensor that an autograd function computes, with its place in the graph."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result
