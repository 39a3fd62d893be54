"""Makes the name "unisono" known to torch.distributed.

torch is imported inside the functions: torch itself imports this module at the end of its own import.
"""

import math
import multiprocessing
import sys
from datetime import timedelta
from typing import Any

__all__ = ["autoload", "register"]

NAME = "unisono"


def _create(options: Any, backend_options: Any = None) -> Any:
    """torch's factory for a new group: joins the default group at once, any other with its first call."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend as _Backend

    from unisono.backend import patches
    from unisono.backend.group import given
    from unisono.backend.options import Options, from_environment, kernels_wanted, pinned
    from unisono.backend.process_group import UnisonoProcessGroup
    from unisono.errors import UsageError
    from unisono.transport.process import pin

    patches.apply()
    devices = None
    if torch.cuda.is_available():
        from unisono.backend.device_group import TwoDeviceGroup, asked_devices

        devices = asked_devices(sys._getframe(1))
    kernels = kernels_wanted()
    choices = backend_options if backend_options is not None else from_environment()
    if isinstance(choices, _Backend.Options) and devices is not None:
        choices = from_environment()  # torch made them for the backend of the other device
    if not isinstance(choices, Options | None):
        raise UsageError(f"pg_options for unisono must be unisono.Options, not {type(choices).__name__}")
    default = not options.global_ranks_in_group and not dist.is_initialized()
    group = given[0] if given else _group(options, choices, default)
    if default:
        here = group.ranks_here
        if pinned(choices) and (cores := pin(here.index(options.group_rank), len(here))):
            torch.set_num_threads(min(torch.get_num_threads(), len(cores)))  # more would wait for each other's core
        group.serve_all()
    if devices is None:
        return UnisonoProcessGroup(group, options.store, options.timeout)
    return TwoDeviceGroup(group, options.store, options.timeout, devices, kernels)


def _group(options: Any, choices: Any, default: bool) -> Any:
    """This rank's membership, as torch asks for it; ``default``: in the default group."""
    from unisono.backend.birth import fail_together
    from unisono.backend.group import Group
    from unisono.backend.member_registry import MemberRegistry, default_memory
    from unisono.backend.stores import announcements, shared_store
    from unisono.errors import UnisonoError, UsageError

    rank, global_ranks = options.group_rank, list(options.global_ranks_in_group)
    if default and hasattr(multiprocessing.current_process(), "_inheriting"):
        raise UsageError(
            f"rank {rank}: init_process_group is called while multiprocessing imports the main module into a process "
            "that it has started (by spawn or forkserver): put what only the first process is to run under "
            'if __name__ == "__main__":'
        )
    whole = not global_ranks  # the default group, or one that a user makes over a store of its own
    global_ranks = global_ranks or list(range(options.group_size))
    if not 0 <= rank < len(global_ranks):
        size = len(global_ranks)
        there = f"ranks go from 0 to {size - 1}" if size else "it has no ranks; world_size is to be 1 at least"
        raise UsageError(f"rank {rank} in a world of size {size}: {there}")
    timeout: timedelta = options.timeout
    seconds = timeout.total_seconds() if timeout is not None else -1.0
    seconds = seconds if seconds >= 0 else math.inf  # negative: timedelta.max, say, which torch's clock does not hold
    label = "the default group" if default else f"group {options.group_id} {global_ranks}"
    # torch's name for a default group counts the attempts to make one, which may be more on one rank than on another.
    name = "default" if default else options.group_id
    # Tells this default group's sub-groups from those of an earlier one over the same store; nothing if it is of
    # another backend, whatever groups this process was in before.
    world = default_memory()
    epoch = f"whole {name}" if whole else world.nonce if world is not None else ""
    store = shared_store(options.store)
    if not whole and world is not None and world.store is not None:
        store = world.store
    try:
        members = MemberRegistry(store, epoch, name, label, global_ranks, rank, counted=not whole)
        group = Group(rank, global_ranks, label, seconds, members, choices)
        group.joins_described = not whole and members.joins_early()  # once it has its description
        if members.joins_early() and not group.joins_described:
            group.wait_for_all()
    except (UnisonoError, OSError):
        if default:
            fail_together(announcements(store, epoch, name), rank, len(global_ranks))
        raise
    return group


def register() -> None:
    """Registers the backend, once; ``import unisono`` calls this."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        from unisono.backend.patches import replace_gloo, serve_launchers

        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        serve_launchers()
        replace_gloo()


def autoload() -> None:
    """Called by torch's backend autoload (entry point group ``torch.backends``) at ``import torch``."""
    register()
