"""torch's own nn.SyncBatchNorm on CPU tensors: torch refuses them before any backend is asked, and so does its DDP.

Where the group's backend for CPU tensors is unisono they are normalised as by our SyncBatchNorm; elsewhere nothing
changes. Set up with a process's first group of unisono, so that an unmodified program runs.
"""

from functools import wraps

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.data.sync_batch_norm import normalise

__all__ = ["serve_cpu_tensors"]


def serve_cpu_tensors() -> None:
    """Teaches nn.SyncBatchNorm, and DDP around it, to take CPU tensors in groups of unisono."""
    plain, refuse = nn.SyncBatchNorm.forward, DistributedDataParallel._passing_sync_batchnorm_handle

    @wraps(plain)
    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if self.training and input.device.type == "cpu" and _ours(self.process_group):
            self._check_input_dim(input)
            self._check_non_zero_input_channels(input)
            return normalise(self, input, self.process_group)
        return plain(self, input)

    @wraps(refuse)
    def refuse_elsewhere(self: DistributedDataParallel, module: nn.Module) -> None:
        if self.device_type != "cpu" or not _ours(self.process_group):
            refuse(self, module)  # type: ignore[no-untyped-call]

    nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]
    DistributedDataParallel._passing_sync_batchnorm_handle = refuse_elsewhere  # type: ignore[method-assign]


def _ours(group: dist.ProcessGroup | None) -> bool:
    return dist.is_initialized() and "unisono" in dist.get_backend_config(group)
