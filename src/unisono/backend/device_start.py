"""What a group's calls on GPUs need: the inner NCCL, and kernels over mapped memory where all ranks can run them.

Made with the first of them, collectively. Whatever may fail on one rank alone comes before the facts are exchanged, so
that all choose alike, and none waits for a rank that can not go on.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from unisono.backend.device_facts import exchanged, no_kernels, own_facts
from unisono.backend.device_messages import DeviceMessages
from unisono.backend.group import Group
from unisono.backend.inner import Inner
from unisono.gpu.kernels import KernelCalls
from unisono.gpu.messages import MessageKernels, load_message_kernels
from unisono.gpu.workspace import symmetric_workspace
from unisono.units import show_ranks

__all__ = ["DeviceParts", "made"]

_log = logging.getLogger("unisono")


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """``kernels``: None where NCCL carries all calls."""

    inner: Inner
    kernels: KernelCalls | None
    messages: DeviceMessages


def made(
    group: Group, store: Any, timeout: timedelta, device: torch.device, kernels: bool, check: Callable[[], None]
) -> DeviceParts:
    """The parts of a rank's calls on ``device``; ``kernels``: whether its user wants them; ``check`` raises the error
    of the group if it has failed.
    """
    torch.cuda.set_device(device)
    store, seconds, name = PrefixStore(f"cuda/{group.nonce}/", store), min(group.timeout, 1e6), f"unisono/{group.nonce}"
    over_hosts = group.segment is not None and group.segment.elsewhere is not None
    mine = own_facts(device, kernels, group.size)
    if kernels and not over_hosts and not mine.unable:
        mine = replace(mine, unable=load_message_kernels(device.index))
    found = exchanged(store, group.rank, group.global_ranks, group.label, mine, seconds)
    inner = Inner("nccl", PrefixStore("nccl/", store), group.rank, group.global_ranks, timeout, name, device)
    calls: KernelCalls | None = None
    why = no_kernels(found, over_hosts)
    if not why:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        space, least = symmetric_workspace(name, device, group.size), min(f.multiprocessors for f in found)
        calls = KernelCalls(space, group.rank, group.size, least, seconds, found[0].table)
        # No rank raises a flag before all workspaces are empty. This is no call of the program's, which a trace counts.
        inner.backend.barrier().wait()
    if group.rank == 0:
        how = f"NCCL alone: {why}" if why else "kernels over mapped memory, and NCCL for what they do not serve"
        _log.info("%s: calls on GPUs of %s by %s", group.label, show_ranks(group.size), how)
    by_kernels = MessageKernels(calls) if calls is not None else None
    return DeviceParts(inner, calls, DeviceMessages(group, inner, device, by_kernels, check))
