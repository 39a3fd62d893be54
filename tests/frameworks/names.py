"""torch's functional collectives under the names of torch 2.13, also where torch has only the older ones."""

from collections.abc import Callable
from typing import Any

import torch.distributed._functional_collectives as functional

__all__ = [
    "all_gather_single", "all_gather_single_autograd", "all_gather_single_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_autograd", "reduce_scatter_single_coalesced",
]  # fmt: skip


def _either(name: str, older: str) -> Callable[..., Any]:
    return getattr(functional, name if hasattr(functional, name) else older)


all_gather_single = _either("all_gather_single", "all_gather_tensor")
all_gather_single_autograd = _either("all_gather_single_autograd", "all_gather_tensor_autograd")
all_gather_single_coalesced = _either("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
reduce_scatter_single = _either("reduce_scatter_single", "reduce_scatter_tensor")
reduce_scatter_single_autograd = _either("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
reduce_scatter_single_coalesced = _either("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
