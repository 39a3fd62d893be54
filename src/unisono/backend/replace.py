"""Gives a program that asks torch for Gloo a group of unisono, where the environment says UNISONO_REPLACES=gloo.

For programs whose framework names the backend itself and takes no other: Accelerate, and with it Hugging Face's Trainer
and TRL, start CPU ranks with "gloo" whatever they are told. torch has no setting for it, and creates Gloo's groups
without asking the registry of backends; so the functions that take a backend's name are wrapped. What the program asks
for is also what torch tells it: frameworks compare `get_backend` with the names that they know, and Ignite leaves out
data parallelism where it knows none. Off by default.
"""

import functools
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from unisono.backend.objects import replaced
from unisono.errors import UsageError

__all__ = ["install"]

VARIABLE = "UNISONO_REPLACES"
_NAMES = {"gloo": "unisono", "cpu:gloo": "cpu:unisono"}
"""What a program may ask for, and what it gets. A name that serves a GPU too is left to torch."""


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function of torch's with its argument ``backend`` replaced."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs)
        name = asked.arguments.get("backend")
        if isinstance(name, str):
            asked.arguments["backend"] = _NAMES.get(name.lower(), name)
        return original(*asked.args, **asked.kwargs)

    return function


def _get_backend(original: Callable[..., str], group: Any = None) -> str:
    """The name that the program gave."""
    name = original(group)
    return next((asked for asked, given in _NAMES.items() if given == name), name)


def _monitored_barrier(
    original: Callable[..., Any], group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    import torch.distributed as dist

    pg: Any = group or dist.group.WORLD
    pg.monitored_barrier(timeout, wait_all_ranks)


def install() -> None:
    """Wraps torch's functions, once, if the environment asks for it."""
    import torch.distributed as dist

    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    if asked != "gloo":
        raise UsageError(f"{VARIABLE}={asked}: only gloo can be replaced; set it to gloo, or unset it")
    dist.Backend.default_device_backend_map["cpu"] = "unisono"
    for name in ("init_process_group", "new_group"):
        _put(name, _naming(getattr(dist, name)))
    _put("get_backend", replaced(dist.get_backend, _get_backend, 0))
    _put("monitored_barrier", replaced(dist.monitored_barrier, _monitored_barrier, 0))  # torch's is for Gloo alone


def _put(name: str, function: Callable[..., Any]) -> None:
    """Puts a function in the place of torch's."""
    import torch.distributed as dist

    setattr(dist.distributed_c10d, name, function)
    setattr(dist, name, function)
