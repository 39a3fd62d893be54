"""Whole state_dicts of split layers, uneven ones too; torch's get_model_state_dict gathers DTensors alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.shards import Group, Sharded, Split
from unisono.parallel.tensor.regions import start_all_gather

__all__ = ["full_state_dict", "gather_whole", "load_full_state_dict"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state_dict with every split parameter whole, in the shapes of the unsplit model; on every rank.

    Every rank of the layers' groups must call it: one all_gather per split parameter. The tensors are copies.
    """
    shards = dict(_shards(model))
    state: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name in shards:
            layer, split = shards[name]
            state[name] = gather_whole(value, split, layer.group)
        else:
            state[name] = value.detach().clone() if isinstance(value, Tensor) else value
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Give the model this rank's shares of a state_dict of whole tensors, as `full_state_dict` or one process saved it.

    No communication. Raises UsageError for a whole tensor of another shape; RuntimeError, as torch does, for names that
    are missing or unknown while `strict`.
    """
    shards, local = dict(_shards(model)), dict(state)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, (layer, split) in shards.items():
        if name in local:
            expected = list(parameters[name].shape)
            expected[split.dim] = split.total
            if list(local[name].shape) != expected:
                raise UsageError(f"{name} must be whole, {expected}, not {list(local[name].shape)}")
            local[name] = split.take(local[name], layer.place.rank)
    model.load_state_dict(local, strict=strict)


def _shards(model: nn.Module) -> Iterator[tuple[str, tuple[Sharded, Split]]]:
    """Every split parameter by its name in the state_dict."""
    for prefix, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, Sharded):
            for name, split in layer.splits.items():
                yield f"{prefix}.{name}" if prefix else name, (layer, split)


def gather_whole(share: Tensor, split: Split, group: Group) -> Tensor:
    """The whole of which each rank of the group holds its share, on every rank. Collective."""
    lengths = [length * split.parts for length in split.lengths]
    stacked = start_all_gather(share.detach().movedim(split.dim, 0), lengths, group)()
    return split.join([part.movedim(0, split.dim) for part in torch.split(stacked, lengths)]).contiguous()
