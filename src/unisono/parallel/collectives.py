"""torch.distributed's single-tensor collectives under the names of torch 2.13; the older names warn there."""

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

_newest: Any = dist
all_gather_single = getattr(_newest, "all_gather_single", None) or _newest.all_gather_into_tensor
reduce_scatter_single = getattr(_newest, "reduce_scatter_single", None) or _newest.reduce_scatter_tensor
