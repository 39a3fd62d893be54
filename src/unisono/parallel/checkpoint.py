"""Checkpoints of a model and its optimizer: one folder that every rank writes its part of, or a whole on every rank.

Stands on torch.distributed.checkpoint (DCP): a folder written by some ranks loads on another number of them.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.parallel.data import DataParallel
from unisono.parallel.sharded import ShardedOptimizer

__all__ = ["full_state", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    folder: str | Path,
    module: nn.Module,
    optimizer: Optimizer | ShardedOptimizer,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write model and optimizer into `folder`, each rank its own part. Collective.

    `module` may be cut by shard_parameters, wrapped in DataParallel, or plain; a value that all ranks hold is written
    once. Names are those of the module without the wrapper. Before the optimizer's first step no states are written.
    """
    save(_state(module, optimizer, allocate=False), checkpoint_id=str(folder), process_group=group)


def load_checkpoint(
    folder: str | Path,
    module: nn.Module,
    optimizer: Optimizer | ShardedOptimizer,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read what `save_checkpoint` wrote, also on another number of ranks, into module and optimizer. Collective.

    Where it was written before the first step, the optimizer has no states afterwards. Raises UsageError on every rank
    if there is no checkpoint in the folder.
    """
    has_states = _has_states(folder)
    state = _state(module, optimizer, allocate=has_states)
    if isinstance(optimizer, ShardedOptimizer):
        if not has_states:
            state["optimizer"].pop("state")
        load(state, checkpoint_id=str(folder), process_group=group)
        _unwrapped(module).load_state_dict(state["model"])
        optimizer.load_state_dict({"state": {}, **state["optimizer"]})
        return
    if not has_states:
        state["optimizer"]["state"] = {}
    load(state, checkpoint_id=str(folder), process_group=group)
    set_state_dict(_unwrapped(module), optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if not has_states:
        optimizer.state.clear()


def full_state(module: nn.Module, optimizer: Optimizer | ShardedOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts of model and optimizer as whole tensors, on every rank. Collective.

    That of a ShardedOptimizer is the one that its torch optimizer has in one process; that of a torch optimizer has
    parameters by name, as torch.distributed.checkpoint.state_dict defines it.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return dict(_unwrapped(module).state_dict()), optimizer.full_state_dict()
    return _torchs(module, optimizer, options=StateDictOptions(full_state_dict=True))


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DataParallel) else module


def _has_states(folder: str | Path) -> bool:
    """Whether a checkpoint was written after the optimizer's first step."""
    try:
        stored = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    except OSError:
        raise UsageError(f"there is no checkpoint in {folder}: expected a folder that was saved to") from None
    return any(name.startswith("optimizer.state.") for name in stored)


def _state(module: nn.Module, optimizer: Optimizer | ShardedOptimizer, allocate: bool) -> dict[str, Any]:
    """What DCP writes, or reads into."""
    if isinstance(optimizer, ShardedOptimizer):
        return {"model": _unwrapped(module).state_dict(), "optimizer": optimizer.state_dict(allocate)}
    model, optim = _torchs(module, optimizer, allocate)
    return {"model": model, "optimizer": optim}


def _torchs(
    module: nn.Module, optimizer: Optimizer, allocate: bool = False, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts of model and optimizer by DCP, which makes states by a step without effect if there are none.

    Such a step would count as the first: unless room is to be allocated, those states are taken away again.
    """
    is_fresh = not optimizer.state
    model, optim = get_state_dict(_unwrapped(module), optimizer, options=options)
    if is_fresh and not allocate:
        optimizer.state.clear()
        optim["state"] = {}
    return dict(model), dict(optim)
