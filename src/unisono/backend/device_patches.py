"""Two functions of torch.distributed for groups with GPUs, which torch serves for groups of its own C++ class alone.

    batch_isend_irecv    the messages of CUDA tensors of a batch are issued together (device_messages.py)
    split_group          a group for each part of another one's ranks, as `new_group` makes it

Groups without GPUs and other backends go through torch's own code.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.backend.device_group import TwoDeviceGroup

__all__ = ["patch"]


def _batch(original: Callable[..., Any], p2p_op_list: Sequence[Any]) -> Any:
    """The Works of a batch's messages."""
    ops = list(p2p_op_list) if isinstance(p2p_op_list, list | tuple) else []
    group = _ours(ops[0].group) if ops and all(isinstance(op, dist.P2POp) for op in ops) else None
    if group is None or not all(op.tensor.is_cuda for op in ops):
        return original(p2p_op_list)
    dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
    return group._cuda.batch([("send" if op.op is dist.isend else "recv", *_data(op)) for op in ops])


def _data(op: Any) -> tuple[Any, int, int]:
    """The tensor, group rank and tag of an operation."""
    tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
    return tensor, op.group_peer, op.tag


def _ours(group: Any) -> "TwoDeviceGroup | None":
    """A group, or the default one, if it is unisono's and has GPUs."""
    from unisono.backend.device_group import TwoDeviceGroup  # what has no GPUs needs none of it

    found = group or dist.group.WORLD
    return found if isinstance(found, TwoDeviceGroup) else None


def _split(original: Callable[..., Any], **asked: Any) -> Any:
    """The group of the part that this rank is in; None if it is in none."""
    parent, parts = _ours(asked["parent_pg"]), asked["split_ranks"]
    if parent is None:
        return original(**asked)
    if not parts or not all(parts):
        raise UsageError("split_group needs split_ranks: a list of parts, each a list of ranks of the parent group")
    flat = [rank for part in parts for rank in part]
    if len(set(flat)) != len(flat) or not all(0 <= rank < parent.size() for rank in flat):
        raise UsageError(f"split_ranks {parts}: each is a group rank, 0 to {parent.size() - 1}, in one part at most")
    everyone = parent is dist.group.WORLD  # then all ranks make all groups, whose names are numbers
    found = None
    for part in parts:
        here = parent.rank() in part
        if everyone or here:
            ranks = sorted(dist.get_global_rank(parent, rank) for rank in part)
            made = dist.new_group(
                ranks, asked["timeout"], dist.get_backend(parent), asked["pg_options"],
                use_local_synchronization=not everyone, group_desc=asked["group_desc"],
            )  # fmt: skip
            found = made if here else found
    return found


def patch(put: Callable[[str, Callable[..., Any]], None]) -> None:
    """Puts both in the place of torch.distributed's by ``put``, where this process has GPUs."""
    if not torch.cuda.is_available():
        return
    batch, split = dist.batch_isend_irecv, dist.split_group
    signature = inspect.signature(split)

    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        return _batch(batch, p2p_op_list)

    @functools.wraps(split)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        return _split(split, **asked.arguments)

    put("batch_isend_irecv", batch_isend_irecv)
    put("split_group", split_group)
