"""The backends by which data travels between hosts: Gloo, unisono, and those that are registered for CPU tensors."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
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
    name, makers = backend.lower() if isinstance(backend, str) else "", _makers()
    if name in makers and "cpu" in dist.Backend.backend_capability.get(name, ()):
        return str(name)
    raise UsageError(
        f"backend={backend!r}: expected one that moves CPU tensors between hosts, of this process's "
        f"{', '.join(makers)}; others join them by torch.distributed.Backend.register_backend"
    )


def make_group(backend: str, store: Any, rank: int, processes: Sequence[Identity], seconds: float) -> Any:
    """This process as ``rank`` of a group of these processes, which torch.distributed does not know.

    ``store``: theirs alone. Calls time out after ``seconds``. Raises as the backend does.
    """
    return _makers()[backend](store, rank, processes, seconds)


Maker = Callable[[Any, int, Sequence[Identity], float], Any]


def _makers() -> dict[str, Maker]:
    """What makes a group, by the name of its backend."""
    plugins = {name.lower(): plugin for name, plugin in dist.Backend._plugins.items()}
    return _OWN | {name: partial(_registered, plugin) for name, plugin in plugins.items() if name not in _OWN}


def _gloo(store: Any, rank: int, processes: Sequence[Identity], seconds: float) -> Any:
    return make_gloo(store, rank, len(processes), timedelta(seconds=seconds))


def _unisono(store: Any, rank: int, processes: Sequence[Identity], seconds: float) -> Any:
    return private_group(store, rank, processes, "weights", seconds, one_host=False)


def _registered(plugin: Any, store: Any, rank: int, processes: Sequence[Identity], seconds: float) -> Any:
    """As torch calls what was given to `register_backend`."""
    limit, size = timedelta(seconds=seconds), len(processes)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = limit, "weights"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)


_OWN: dict[str, Maker] = {"gloo": _gloo, "unisono": _unisono}
