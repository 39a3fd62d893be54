"""A tiny transformer, its batches, and what one process makes of them: what every mesh is compared with."""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.parallel.mesh import Transformer

CONTEXT, VOCABULARY, ROWS, STEPS = 9, 19, 9, 5
MAX_NORM = 0.5


class Reference(NamedTuple):
    """Losses and gradient norms of every step, and the gradients of the first, before they were clipped."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def whole(layers: int = 4, seed: int = 3) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(width=16, layers=layers, heads=8, context=CONTEXT, vocabulary=VOCABULARY)


def batches() -> list[Tensor]:
    """Sequences that count up by 1, 2 or 3: (ROWS, CONTEXT + 1) each."""
    generator = torch.Generator().manual_seed(4)
    start = torch.randint(VOCABULARY, (STEPS, ROWS, 1), generator=generator)
    pace = torch.randint(1, 4, (STEPS, ROWS, 1), generator=generator)
    return list((start + pace * torch.arange(CONTEXT + 1)) % VOCABULARY)


def end(mesh: DeviceMesh) -> None:
    """Destroy the groups of a mesh, in one order on all ranks."""
    for group in {mesh.get_group(axis): None for axis in mesh.mesh_dim_names}:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.05)


@cache
def one_process(layers: int) -> Reference:
    """Plain torch, one model, the whole batch."""
    model = whole(layers)
    optimizer = adam(model.parameters())
    result = Reference([], [], {})
    for windows in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        if not result.losses:
            result.gradients.update((name, weight.grad.clone()) for name, weight in model.named_parameters())
        result.losses.append(loss.item())
        result.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return result
