"""Layouts found by looking at a model: plain tensors, DTensor and FSDP2, the split layers of unisono.parallel."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.errors import UsageError
from unisono.parallel.shards import Sharded, Split
from unisono.weights.layout import (
    Box,
    Layout,
    Part,
    TensorLayout,
    cut_part,
    merge,
    whole_part,
)
from unisono.weights.sharding import Shard, Sharding, has_dim, shards_of
from unisono.weights.side import Side

__all__ = ["inspect", "is_dtensor", "layout", "local_tensors", "named_tensors"]

Source = nn.Module | Mapping[str, Tensor]


def named_tensors(source: Source) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a module, by the names of its state_dict, or the tensors of a mapping.

    The module's own objects, not copies; without what torch calls extra state. Raises UsageError for anything else, and
    for a tensor that a module computes for its state_dict.
    """
    if isinstance(source, nn.Module):
        return _of_module(source)
    if not isinstance(source, Mapping):
        raise UsageError(f"expected a module or a mapping of names to tensors, got {type(source).__name__}")
    found = {name: tensor for name, tensor in source.items() if not _is_extra(name)}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or not isinstance(name, str):
            raise UsageError(f"a mapping must be of names to tensors, but {name!r} is {type(tensor).__name__}")
    return found


def _of_module(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict(keep_vars=True)  # FSDP2 shards again for it what the last forward has gathered
    own: dict[Any, Tensor] = {}
    for each in module.modules():
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None:
                own[id(tensor)] = tensor
                own.setdefault(_view_key(tensor), tensor)  # what a hook has detached is still its own
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or _is_extra(name):
            continue
        mine = own.get(id(tensor), own.get(_view_key(tensor)))
        if mine is None:
            raise UsageError(
                f"{name} is computed for the state_dict, and no parameter or buffer of the module: give a mapping of "
                "names to tensors (as a source, a callable that returns one)"
            )
        found[name] = mine
    return found


def _is_extra(name: object) -> bool:
    """True for extra state, which `get_extra_state` computes and `set_extra_state` takes."""
    return str(name).rpartition(".")[2] == "_extra_state"


def _view_key(tensor: Tensor) -> Any:
    """Equal for the same view of the same storage; a key of its own for a tensor without memory."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_nested or not _local(tensor).numel():
        return id(tensor)
    own = _local(tensor)
    return own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride(), own.dtype, tensor.shape


def local_tensors(source: Source) -> dict[str, Tensor]:
    """This rank's own tensors by name: the local shard of a DTensor, else the tensor; without autograd."""
    return {name: _local(tensor) for name, tensor in named_tensors(source).items()}


def _local(tensor: Tensor) -> Tensor:
    own = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return own.detach()


def is_dtensor(tensor: Any) -> bool:
    """True for torch's distributed tensors."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def layout(source: Source, *, shard: Sharding | None = None, group: Any = None) -> Layout:
    """What the ranks of a side hold, found by looking at the source; no tensor is read, so meta tensors do.

    source: a module (parameters and persistent buffers) or a mapping of names to tensors. shard: pattern → dim or
    Shard, for plain tensors that are this rank's part of one. group: the side; None: the default group if there is
    one, else this process; "self": this process alone. Collective over the group, one small all_gather of text.

    Raises UsageError for what is no group, a pattern without a match or a DTensor with Partial placement,
    MismatchError if the ranks disagree.
    """
    own = inspect(source, shard=shard)
    side = Side(group)
    if side.world_size == 1:
        return merge([own])
    texts: list[Any] = [None] * side.world_size
    dist.all_gather_object(texts, own.to_text(), group)
    return merge([Layout.from_text(text) for text in texts])


def inspect(source: Source, *, shard: Sharding | None = None) -> Layout:
    """What this rank alone holds: a layout of one rank, for `merge`. No communication."""
    found = named_tensors(source)
    splits = _splits(source) if isinstance(source, nn.Module) else {}
    declared = shards_of(tuple(found), shard)
    tensors = {name: _tensor(name, t, splits.get(name), declared.get(name)) for name, t in found.items()}
    return Layout(1, tensors, _ties(found))


def _ties(found: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of the same view of the same storage, each with the first."""
    seen: dict[Any, str] = {}
    ties = {}
    for name, tensor in found.items():
        first = seen.setdefault(_view_key(tensor), name)
        if first != name:
            ties[name] = first
    return ties


def _splits(module: nn.Module) -> dict[str, tuple[Split, int]]:
    """The split of every parameter of a layer of unisono.parallel, and this rank's number in its group."""
    found = {}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, Sharded):
            for name, split in layer.splits.items():
                found[f"{prefix}.{name}" if prefix else name] = split, layer.place.rank
    return found


def _tensor(name: str, tensor: Tensor, split: tuple[Split, int] | None, shard: Shard | None) -> TensorLayout:
    if is_lazy(tensor):
        raise UsageError(f"{name} has no shape yet: run the model once before its layout is looked at")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UsageError(f"{name} is a {kind} tensor: expected a dense one")
    shape = tuple(tensor.shape)
    if is_dtensor(tensor):
        return TensorLayout(shape, tensor.dtype, (_of_dtensor(name, tensor),))
    if split is not None:
        return _of_split(shape, tensor.dtype, *split)
    if shard is not None and has_dim(shape, shard):
        return TensorLayout(shape, tensor.dtype, (whole_part(shape),), shard)
    return TensorLayout(shape, tensor.dtype, (whole_part(shape),))


def _of_split(shape: tuple[int, ...], dtype: torch.dtype, split: Split, rank: int) -> TensorLayout:
    each, lengths = split.total // split.parts, split.lengths
    before, own = sum(lengths[:rank]), lengths[rank]
    whole = (*shape[: split.dim], split.total, *shape[split.dim + 1 :])
    runs = [(block * each + before, own, block * own) for block in range(split.parts)]
    return TensorLayout(whole, dtype, (cut_part(whole, split.dim, runs),))


Runs = list[tuple[int, int]]


def _of_dtensor(name: str, tensor: Any) -> Part:
    """The boxes of a DTensor on this rank: its placements applied to the index of every dim, in mesh order."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    own = mesh.get_coordinate()
    if own is None or not math.prod(shape):
        return ()
    runs: list[Runs] = [[(0, length)] for length in shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UsageError(
                f"{name} is a DTensor with {placement} placement, an unfinished sum: redistribute it to Replicate or "
                "Shard first"
            )
        dim = getattr(placement, "dim", None)
        if dim is not None:
            factor = getattr(placement, "split_factor", 1)
            chunks = [_chunk(runs[dim], factor, i) for i in range(factor)]
            runs[dim] = _joined([run for c in chunks for run in _chunk(c, mesh.size(axis), own[axis])])
    return _product(runs)


def _chunk(runs: Runs, count: int, index: int) -> Runs:
    """The index-th of `count` chunks of the elements in runs (start, length), cut as torch.chunk does."""
    total = sum(length for _, length in runs)
    each = -(-total // count)
    begin, end = min(index * each, total), min((index + 1) * each, total)
    taken, at = [], 0
    for start, length in runs:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            taken.append((start + low - at, high - low))
        at += length
    return taken


def _joined(runs: Runs) -> Runs:
    """Runs that follow each other as one."""
    joined: Runs = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    return joined


def _product(runs: list[Runs]) -> Part:
    """A box for every combination of one run per dim."""
    boxes = [Box((), (), ())]
    for dim in runs:
        longer, at = [], 0
        for start, length in dim:
            longer += [Box((*b.offsets, start), (*b.shape, length), (*b.at, at)) for b in boxes]
            at += length
        boxes = longer
    return tuple(boxes)
