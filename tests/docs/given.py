"""What the fragments of Python on the pages take as given: a net, batches, a group. By the heading they stand under."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["given"]


def _training() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    net.blocks = []
    batches = [torch.ones(3, 4), torch.zeros(3, 4)]

    def loss_of(net_or_output: Any, batch: torch.Tensor) -> torch.Tensor:
        output = net_or_output(batch) if isinstance(net_or_output, nn.Module) else net_or_output
        return output.square().mean()

    return {
        "net": net,
        "loader": [(batch, batch) for batch in batches],
        "batches": batches,
        "inputs": batches[0],
        "targets": batches[0],
        "loss_of": loss_of,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }


def _tensor() -> dict[str, Any]:
    hidden = torch.randn(2, 3, 512)
    sums = {"partial_sum": hidden, "residual": torch.zeros(2, 3, 512), "weight": torch.ones(512)}
    return {"hidden": hidden, "targets": torch.randint(0, 50257, (2, 3))} | sums


def _experts() -> dict[str, Any]:
    rows = torch.randn(6, 4)
    return {"rows": rows, "rank_of_row": torch.tensor([0, 0, 0, 1, 1, 1]), "capacity": 8, "expert": nn.Linear(4, 4)}


def _sequence() -> dict[str, Any]:
    query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
    return {"tokens": torch.arange(24).reshape(1, 24), "total": 24, "query": query, "key": key, "value": value}


def _pipeline() -> dict[str, Any]:
    return {"layers": [nn.Linear(4, 4) for _ in range(4)], "inputs": torch.randn(8, 4), "targets": torch.arange(8) % 4}


def _mesh() -> dict[str, Any]:
    return {"windows": torch.randint(0, 256, (8, 97))}


SECTIONS = {
    "Data": _training,
    "Batch": _training,
    "Sharded": _training,
    "Parameter": _training,
    "Tensor:": _tensor,
    "Experts:": _experts,
    "Sequence:": _sequence,
    "Pipeline": _pipeline,
    "Together:": _mesh,
}


def given(section: str, rank: int, world_size: int) -> dict[str, Any]:
    """The names that a fragment under a heading finds, on one rank."""
    import signal
    import sys

    import torch.distributed as dist

    import unisono

    torch.manual_seed(0)
    half = world_size // 2
    names: dict[str, Any] = {
        "F": F, "dist": dist, "nn": nn, "signal": signal, "sys": sys, "torch": torch, "unisono": unisono,
        "group": None, "hosts": [[*range(half)], [*range(half, world_size)]], "rank": rank,
        "ranks": [*range(world_size)], "x": torch.ones(4),
    }  # fmt: skip
    return names | SECTIONS.get(section.partition(" ")[0], dict)()
