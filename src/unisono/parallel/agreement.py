"""Checks whose failure every rank raises, where torch leaves the other ranks waiting: models, options, arguments.

torch's DDP compares shapes of parameters when it is built, and no values.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.errors import MismatchError, UsageError
from unisono.units import name_ranks

__all__ = ["assert_replicas_equal", "check_structure", "gather_objects", "raise_on_all_ranks", "require_agreement"]


def assert_replicas_equal(model: nn.Module, group: dist.ProcessGroup | None = None, buffers: bool = False) -> None:
    """Raise MismatchError on every rank, naming the first parameter whose name, dtype, shape, layout or bits differ.

    Collective. Bits are compared by SHA-256, so only a few bytes per parameter travel. `buffers`: those too, after
    all parameters.
    """
    named = list(model.named_parameters()) + (list(model.named_buffers()) if buffers else [])
    mine = [(name, _structure(tensor), _digest(tensor)) for name, tensor in named]
    _compare(mine, group, "give all ranks the same seed or checkpoint, or wrap the model in DistributedDataParallel")


def check_structure(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Raise MismatchError on every rank, naming the first tensor whose name, dtype, shape or layout differs.

    Collective; nothing but names and shapes travels.
    """
    mine = [(name, _structure(tensor), "") for name, tensor in named]
    _compare(mine, group, "build the same model on all ranks")


def _structure(tensor: Tensor) -> str:
    """Dtype, shape and what else has to be equal, in words."""
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.is_contiguous():
        words += f" strides {list(tensor.stride())}"
    return words if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else f"{words} frozen"


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of the group passes, in rank order. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def _compare(mine: list[tuple[str, str, str]], group: dist.ProcessGroup | None, remedy: str) -> None:
    gathered = gather_objects(mine, group)
    first = gathered[0]
    for index in range(max(len(listed) for listed in gathered)):
        held = [listed[index] if index < len(listed) else None for listed in gathered]
        if any(entry != held[0] for entry in held):
            counts = ", ".join(str(len(listed)) for listed in gathered)
            name = first[index][0] if index < len(first) else next(entry[0] for entry in held if entry is not None)
            raise MismatchError(
                f"the models of the ranks differ, first in {name!r} (no. {index}; the ranks hold {counts} of them): "
                f"{_sides(held, dist.get_process_group_ranks(group))}; {remedy}"
            )


def _sides(held: list[tuple[str, str, str] | None], ranks: list[int]) -> str:
    """Which ranks hold what: `rank 0 has 'a.weight' float32 [2, 3]; ranks 1, 2 have …`."""
    sides: dict[Any, list[int]] = {}
    for rank, entry in zip(ranks, held, strict=True):
        sides.setdefault(entry, []).append(rank)
    only_bits = len({entry[:2] if entry else None for entry in sides}) == 1
    words = []
    for entry, members in sides.items():
        what = "nothing" if entry is None else f"{entry[0]!r} {entry[1]}"
        words.append(f"{name_ranks(members)}: {what}" + (f" with bits {entry[2][:8]}" if only_bits and entry else ""))
    return "; ".join(words)


def raise_on_all_ranks(mismatch: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise UsageError with the mistakes of all ranks, on every rank, if there are any. Collective."""
    ranks: dict[str, list[int]] = {}
    for rank, words in zip(dist.get_process_group_ranks(group), gather_objects(mismatch, group), strict=True):
        if words is not None:
            ranks.setdefault(words, []).append(rank)
    if ranks:
        lines = (f"{name_ranks(who)}: {words}" for words, who in ranks.items())
        raise UsageError("; ".join(lines))


def require_agreement(check: Callable[[], None], configuration: str) -> None:
    """Run a check on every rank of the default group; raise its UsageError on all ranks if it fails on any. Collective.

    Raises MismatchError on all ranks if their `configuration`s differ.
    """
    mismatch = None
    try:
        check()
    except UsageError as problem:
        mismatch = str(problem)
    raise_on_all_ranks(mismatch, None)
    everyone = gather_objects(configuration)
    if len(set(everyone)) > 1:
        listed = ", ".join(f"rank {rank}: {words}" for rank, words in enumerate(everyone))
        raise MismatchError(f"the ranks were given different configurations, expected one for all: {listed}")
