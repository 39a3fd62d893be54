"""The backends by which data travels between hosts: Gloo, unisono, and those that are registered for CPU tensors."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from unisono.backend.private import private_group
from unisono.errors import UsageError
from unisono.transport.handshake import make_gloo
from unisono.transport.process import Identity

__all__ = ["check_backend", "make_group"]


def check_backend(backend: Any) -> str:
    """The name of a backend that moves CPU tensors and can make a group of any processes. Raises `UsageError`."""
    known = backend == "gloo" or (isinstance(backend, str) and backend.upper() in dist.Backend._plugins)
    if known and "cpu" in dist.Backend.backend_capability[backend.lower()]:
        return str(backend)
    names = ["gloo", *map(str.lower, dist.Backend._plugins)]
    raise UsageError(
        f"backend={backend!r}: expected one that moves CPU tensors between hosts, of this process's "
        f"{', '.join(names)}; others join them by torch.distributed.Backend.register_backend"
    )


def make_group(backend: str, store: Any, rank: int, processes: Sequence[Identity], seconds: float) -> Any:
    """This process as ``rank`` of a group of these processes, which torch.distributed does not know.

    ``store``: theirs alone. Calls time out after ``seconds``. Raises as the backend does.
    """
    limit, size = timedelta(seconds=seconds), len(processes)
    if backend == "gloo":
        return make_gloo(store, rank, size, limit)
    if backend == "unisono":
        return private_group(store, rank, processes, "weights", seconds, one_host=False)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = limit, "weights"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
