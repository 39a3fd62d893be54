"""Checkpoints that any other mesh loads, bit for bit: torch.distributed.checkpoint (DCP), given each tensor as a whole.

torch reshards DTensors; these layers are cut in ways that DTensor has not (uneven ones like torch.tensor_split, a fused
query, key and value in three parts at once). So every tensor is put together along tp and stored in the shape it has in
the unsplit model, under its name there: torch's own reader gives it to a plain one. A tensor that many ranks hold is
written once, by one of them. Optimizer states go with their weights, by name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.parallel.agreement import require_agreement
from unisono.parallel.mesh.gradients import ParameterPart
from unisono.parallel.mesh.model import MeshTransformer
from unisono.parallel.shards import Split
from unisono.parallel.tensor.state_dict import gather_whole

__all__ = ["load_mesh_checkpoint", "save_mesh_checkpoint"]

_MODEL, _OPTIMIZER = "model.", "optimizer."


def save_mesh_checkpoint(folder: str | Path, model: MeshTransformer, optimizer: Optimizer) -> None:
    """Write weights and optimizer state into `folder`. Collective over all ranks.

    optimizer: over `model.parameters()`; one that keeps a number per weight or per parameter (AdamW, SGD ...). Learning
    rates and the like are not written: they are the next program's to choose. While it writes, a rank holds its stages
    whole: tp times its own part.
    """
    group = model.groups["tp"]
    state: dict[str, Any] = {}
    for part in model.parts():
        for name, (tensor, split) in _tensors(part, optimizer):
            state[name] = tensor.detach() if split is None else gather_whole(tensor, split, group)
    save(state, checkpoint_id=str(folder))


def load_mesh_checkpoint(folder: str | Path, model: MeshTransformer, optimizer: Optimizer) -> None:
    """Read what `save_mesh_checkpoint` wrote on any mesh into model and optimizer. Collective over all ranks.

    The optimizer's state becomes that of the checkpoint; its learning rates stay. Raises UsageError on every rank,
    before anything is changed, if there is no checkpoint in the folder or it is of another model.
    """
    stored: dict[str, torch.Size] = {}
    require_agreement(lambda: stored.update(_stored(folder, model)), str(folder))
    wanted: dict[str, list[tuple[Tensor, Split | None]]] = {}  # a tied weight is twice on a rank with both ends
    for part in model.parts():
        optimizer.state[part.parameter] = _allocated(part, stored)
        for name, place in _tensors(part, optimizer):
            wanted.setdefault(name, []).append(place)
    state = {name: places[0][0].new_empty(stored[name]) for name, places in wanted.items()}
    load(state, checkpoint_id=str(folder))
    rank = model.places["tp"].rank
    for name, places in wanted.items():
        for tensor, split in places:
            tensor.detach().copy_(state[name] if split is None else split.take(state[name], rank))


def _tensors(part: ParameterPart, optimizer: Optimizer) -> Iterator[tuple[str, tuple[Tensor, Split | None]]]:
    """A parameter and its optimizer state by their names in a checkpoint, and how each is cut along tp.

    What has the weight's shape is cut as the weight is; the rest (step counts) is whole.
    """
    name, parameter, split, _ = part
    yield f"{_MODEL}{name}", (parameter, split)
    for key, value in optimizer.state[parameter].items():
        yield f"{_OPTIMIZER}{name}.{key}", (value, split if value.shape == parameter.shape else None)


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
    for name, parameter, split, _ in model.parts():
        size, there = _whole_size(parameter, split), stored.get(f"{_MODEL}{name}")
        if size != there:
            what = "lacks it" if there is None else f"has {list(there)}"
            raise UsageError(f"the model's {name} is {list(size)}, but the checkpoint in {folder} {what}")
    return stored


def _allocated(part: ParameterPart, stored: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Room for the optimizer's state of a parameter, as the checkpoint has it: step counts are float32."""
    prefix = f"{_OPTIMIZER}{part.name}."
    whole = _whole_size(part.parameter, part.split)
    found = {key.removeprefix(prefix): size for key, size in stored.items() if key.startswith(prefix)}
    return {
        key: torch.zeros_like(part.parameter) if size == whole else torch.zeros(size, dtype=torch.float32)
        for key, size in found.items()
    }


def _whole_size(share: Tensor, split: Split | None) -> torch.Size:
    sizes = list(share.shape)
    if split is not None:
        sizes[split.dim] = split.total
    return torch.Size(sizes)
