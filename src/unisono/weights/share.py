"""Tensors of a module where other processes of the host can read them: replicas then take them without packing."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from unisono.transport.shared_tensor import empty
from unisono.weights.holdings import Holdings, alone, starts_of

__all__ = ["share"]


S = TypeVar("S", bound=nn.Module | Mapping[str, Tensor])


def share(module: S) -> S:
    """Moves parameters and persistent buffers into memory like `unisono.empty`'s; returns the module.

    module: a module, or a mapping of names to tensors. Values, strides and ties are kept, and so are Parameter objects:
    only their memory is another. Replicas of the same host read these tensors where they lie. Where the system refuses
    such memory the tensors are in ordinary memory, and are sent through buckets as ever; so is a tensor whose memory
    is something else's too: a view's, a state_dict's, that of FSDP2.

    Raises `UsageError` if the module is something else.
    """
    holdings = Holdings()
    holdings.look(module)
    assert holdings.layout is not None
    ties = holdings.layout.ties
    free = alone(holdings.local, ties)
    free -= holdings.seen_elsewhere(free)
    once = {n: t for n, t in holdings.local.items() if n in free and n not in ties and t.device.type == "cpu"}
    starts, nbytes = starts_of(once)
    with torch.inference_mode(False), torch.no_grad():
        memory = empty(nbytes, dtype=torch.uint8)
        made = {}
        for name, start in starts.items():
            before = once[name]
            flat = memory[start : start + before.nbytes].view(before.dtype)
            made[name] = flat.as_strided(before.shape, before.stride())
            made[name].copy_(before)
        for name, tensor in holdings.own.items():
            first = ties.get(name, name)
            if first in made:
                tensor.data = made[first]
    return module
