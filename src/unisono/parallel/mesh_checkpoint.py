"""Checkpoints of a model over a mesh: written by one mesh, read by any other, weights equal bit for bit.

Stands on torch.distributed.checkpoint (DCP). Each tensor is stored as one whole, in the shape it has in the unsplit
model, put together from the pieces that the ranks hold: any part of it can be read, whatever wrote it. A weight that
many ranks hold is written once. Optimizer states go with their weights, by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.parallel.mesh import agree
from unisono.parallel.mesh_training import MeshTransformer
from unisono.parallel.shards import Split

__all__ = ["load_mesh_checkpoint", "save_mesh_checkpoint"]

_MODEL, _OPTIMIZER = "model.", "optimizer."


class _Chunk(NamedTuple):
    """A box of the whole tensor, and this rank's memory for it: a view."""

    offsets: torch.Size
    memory: Tensor


class _PartOfWhole:
    """This rank's share of a tensor, as DCP asks for it: which boxes of the whole it holds, and their memory.

    Size and the methods with underscores are what DCP's planners look for in an object of a state dict.
    """

    def __init__(self, share: Tensor, split: Split | None, rank: int) -> None:
        self.share, self.split = share, split
        if split is None:
            self.chunks = [_Chunk(torch.Size([0] * share.dim()), share)]
        else:
            self.chunks = list(_chunks(share, split, rank))

    def size(self) -> torch.Size:
        """That of the whole."""
        return _whole_size(self.share, self.split)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, memory.shape),
                    properties=TensorProperties.create_from_tensor(memory),
                    size=self.size(),
                ),
            )
            for offsets, memory in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, memory.shape) for offsets, memory in self.chunks]

    def memory_at(self, offsets: torch.Size | None) -> Tensor:
        """That of the box with this corner."""
        return next(chunk.memory for chunk in self.chunks if chunk.offsets == offsets)


class _SavePlanner(DefaultSavePlanner):
    """Reads what to write from the boxes."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        part: _PartOfWhole = self.state_dict[index.fqn]
        return part.memory_at(index.offset)


class _LoadPlanner(DefaultLoadPlanner):
    """Writes what was read into the boxes."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part: _PartOfWhole = self.state_dict[index.fqn]
        return part.memory_at(index.offset)


def _whole_size(share: Tensor, split: Split | None) -> torch.Size:
    sizes = list(share.shape)
    if split is not None:
        sizes[split.dim] = split.total
    return torch.Size(sizes)


def _chunks(share: Tensor, split: Split, rank: int) -> Iterator[_Chunk]:
    """One box for each of the split's parts: query, key and value lie apart in the whole."""
    before, length = sum(split.lengths[:rank]), split.lengths[rank]
    for part in range(split.parts):
        offsets = [0] * share.dim()
        offsets[split.dim] = part * (split.total // split.parts) + before
        yield _Chunk(torch.Size(offsets), share.narrow(split.dim, part * length, length))


def save_mesh_checkpoint(folder: str | Path, model: MeshTransformer, optimizer: Optimizer) -> None:
    """Write weights and optimizer state into `folder`, each rank what it holds. Collective over all ranks.

    optimizer: over `model.parameters()`; one that keeps a number per weight or per parameter (AdamW, SGD ...). Learning
    rates and the like are not written: they are the next program's to choose.
    """
    rank = model.mesh.places["tp"].rank
    state: dict[str, Any] = {}
    for name, parameter, split, _ in model.pieces():
        state[f"{_MODEL}{name}"] = _PartOfWhole(parameter.detach(), split, rank)
        for key, value in optimizer.state[parameter].items():
            per_weight = value.shape == parameter.shape
            state[f"{_OPTIMIZER}{name}.{key}"] = _PartOfWhole(value, split if per_weight else None, rank)
    save(state, checkpoint_id=str(folder), planner=_SavePlanner(flatten_state_dict=False))


def load_mesh_checkpoint(folder: str | Path, model: MeshTransformer, optimizer: Optimizer) -> None:
    """Read what `save_mesh_checkpoint` wrote on any mesh into model and optimizer. Collective over all ranks.

    The optimizer's state becomes that of the checkpoint; its learning rates stay. Raises UsageError on every rank,
    before anything is changed, if there is no checkpoint in the folder or it is of another model.
    """
    stored: dict[str, torch.Size] = {}
    agree(lambda: stored.update(_stored(folder, model)), str(folder))
    rank = model.mesh.places["tp"].rank
    state: dict[str, Any] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for name, parameter, split, _ in model.pieces():
        optimizer.state[parameter] = _allocated(name, parameter, split, stored)
        tensors = {f"{_OPTIMIZER}{name}.{key}": value for key, value in optimizer.state[parameter].items()}
        for full_name, tensor in ({f"{_MODEL}{name}": parameter.detach()} | tensors).items():
            if full_name in state:  # a rank with both ends of a pipeline has the tied weight twice
                copies.append((tensor, state[full_name].share))
            else:
                per_weight = tensor.shape == parameter.shape
                state[full_name] = _PartOfWhole(tensor, split if per_weight else None, rank)
    load(state, checkpoint_id=str(folder), planner=_LoadPlanner(flatten_state_dict=False))
    for copy, source in copies:
        copy.copy_(source)


def _stored(folder: str | Path, model: MeshTransformer) -> dict[str, torch.Size]:
    """The tensors in a checkpoint and their sizes, found to be those of the model."""
    try:
        metadata = FileSystemReader(str(folder)).read_metadata()
    except OSError:
        raise UsageError(f"there is no checkpoint in {folder}: expected a folder that was saved to") from None
    except Exception as error:  # a damaged one; the other ranks must hear of it
        raise UsageError(f"the checkpoint in {folder} cannot be read: {type(error).__name__}: {error}") from error
    entries = metadata.state_dict_metadata.items()
    stored = {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
    for name, parameter, split, _ in model.pieces():
        size, there = _whole_size(parameter, split), stored.get(f"{_MODEL}{name}")
        if size != there:
            what = "lacks it" if there is None else f"has {list(there)}"
            raise UsageError(f"the model's {name} is {list(size)}, but the checkpoint in {folder} {what}")
    return stored


def _allocated(name: str, parameter: Tensor, split: Split | None, stored: Mapping[str, torch.Size]) -> dict[str, Any]:
    """Room for the optimizer's state of a parameter: what the checkpoint has of it, in the shape of this rank's share.

    What has the weight's shape is cut as the weight is; the rest (step counts) is float32 and whole.
    """
    prefix = f"{_OPTIMIZER}{name}."
    whole = _whole_size(parameter, split)
    found = {key.removeprefix(prefix): size for key, size in stored.items() if key.startswith(prefix)}
    return {
        key: torch.zeros_like(parameter) if size == whole else torch.zeros(size, dtype=torch.float32)
        for key, size in found.items()
    }
