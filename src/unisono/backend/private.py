"""A group of unisono that torch.distributed does not know: over a store of its own, beside any default group."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from unisono.backend import patches
from unisono.backend.group import Group
from unisono.backend.member_registry import MemberRegistry
from unisono.backend.options import from_environment
from unisono.backend.process_group import UnisonoProcessGroup
from unisono.transport.process import Identity

__all__ = ["peer_memory", "private_group"]


def private_group(
    store: Any, rank: int, processes: Sequence[Identity], name: str, seconds: float, one_host: bool = True
) -> UnisonoProcessGroup:
    """This process as ``rank`` of a group that ``processes``, by rank, make over ``store``.

    ``name`` tells the groups of one store apart. ``one_host``: of one host, where a process that dies before it has
    begun to join is seen (`PeerLostError`). Returns once all have joined; calls time out after ``seconds``. Raises as
    `init_process_group` does.
    """
    patches.apply()
    global_ranks = list(range(len(processes)))
    members = MemberRegistry(store, f"private {name}", name, name, global_ranks, rank, counted=False)
    if one_host:
        members.expected = processes
    group = Group(rank, global_ranks, name, seconds, members, from_environment())
    group.wait_for_all()
    return UnisonoProcessGroup(group, store, timedelta(seconds=seconds))


def peer_memory(group: UnisonoProcessGroup, rank: int) -> Tensor | None:
    """The shared tensors of a rank of a group, all of its heap as bytes; None if it has none that can be mapped."""
    return group._group.collectives.mappings.memory(rank)
