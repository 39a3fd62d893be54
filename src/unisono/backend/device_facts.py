"""What the ranks of a group must know of each other's GPUs before they choose alike, exchanged once over the store."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from unisono.errors import CollectiveTimeout, UsageError
from unisono.gpu.compile import triton_missing
from unisono.gpu.defaults import TABLE, GpuDefault, tuned_table
from unisono.gpu.layout import WORLD_SIZE_MAX
from unisono.selection import Measured
from unisono.units import name_ranks

__all__ = ["Facts", "exchanged", "no_kernels", "no_kernels_here", "own_facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """A rank's GPU. ``visible``: identities of the GPUs that this process sees; ``peers``: those that it may map;
    ``unable``: why it can not run kernels.

    ``table``: which schedule serves which call, also as `unisono tune` has found on this host; rank 0's counts.
    """

    uuid: str
    name: str
    multiprocessors: int
    visible: tuple[str, ...]
    peers: tuple[str, ...]
    unable: str
    kernels: bool
    table: tuple[GpuDefault, ...] = TABLE


def own_facts(device: torch.device, kernels: bool, world_size: int) -> Facts:
    """The facts of this rank; ``kernels``: whether its user wants them."""
    count, mine = torch.cuda.device_count(), device.index
    names = [str(torch.cuda.get_device_properties(k).uuid) for k in range(count)]
    mapped = [names[k] for k in range(count) if k == mine or torch.cuda.can_device_access_peer(mine, k)]
    properties = torch.cuda.get_device_properties(device)
    return Facts(
        names[mine], properties.name, properties.multi_processor_count, tuple(names), tuple(mapped), triton_missing(),
        kernels, _kept_table(world_size),
    )  # fmt: skip


def _kept_table(world_size: int) -> tuple[GpuDefault, ...]:
    """By what `unisono tune` has kept on this host; the built-in one if the file cannot be read, which is logged."""
    try:
        return tuned_table(Measured.load().rows, world_size)
    except UsageError as error:
        logging.getLogger("unisono").warning("GPUs go by the built-in table: %s", error)
        return TABLE


def exchanged(
    store: Any, rank: int, global_ranks: Sequence[int], label: str, mine: Facts, timeout: float
) -> list[Facts]:
    """The facts of all ranks. Raises `CollectiveTimeout` naming ranks that make no call on GPUs in time, `UsageError`
    on all ranks if two share a GPU: NCCL refuses that.
    """
    store.set(f"facts/{rank}", json.dumps(asdict(mine)))
    keys, deadline = [f"facts/{peer}" for peer in range(len(global_ranks))], time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            late = [global_ranks[peer] for peer, key in enumerate(keys) if not store.check([key])]
            raise CollectiveTimeout(
                f"{name_ranks(late)} of {label} made no call on GPUs within {timeout:g} s of this rank's first one"
            )
        time.sleep(0.002)
    found = []
    for key in keys:
        read = json.loads(store.get(key))
        table = tuple(GpuDefault(**row) for row in read["table"])
        found.append(Facts(**read | {"visible": (*read["visible"],), "peers": (*read["peers"],), "table": table}))
    for rank_, facts in enumerate(found):
        first = next(k for k, other in enumerate(found) if other.uuid == facts.uuid)
        if first != rank_:
            raise UsageError(
                f"ranks {global_ranks[first]} and {global_ranks[rank_]} of {label} use one GPU ({facts.name}): give "
                "each its own, by torch.cuda.set_device(LOCAL_RANK) or device_id="
            )
    return found


def no_kernels(found: Sequence[Facts], over_hosts: bool = False) -> str:
    """Why a group runs no kernels; empty if it does. The same on all ranks, since the facts are."""
    if over_hosts:
        return "the GPUs are on several hosts"
    members = {facts.uuid for facts in found}
    if not all(facts.kernels for facts in found):
        return "they are switched off"
    if unable := next((facts.unable for facts in found if facts.unable), ""):
        return unable
    if len(found) > WORLD_SIZE_MAX:
        return f"{len(found)} GPUs: kernels serve up to {WORLD_SIZE_MAX}"
    if not all(members <= set(facts.visible) for facts in found):
        return "a rank does not see its peers' GPUs (CUDA_VISIBLE_DEVICES hides them)"
    if not all(members <= set(facts.peers) for facts in found):
        return "a GPU can not map the memory of a peer"
    return ""


def no_kernels_here(world_size: int) -> str:
    """Why a group of so many GPUs of this host runs no kernels; empty if it does, or there are fewer GPUs."""
    if torch.cuda.device_count() < world_size:
        return ""
    return no_kernels([own_facts(torch.device("cuda", k), True, world_size) for k in range(world_size)])
