"""The bytes of messages that can not be copied: that message fails, all others go on."""

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import ranks

_LONG = 500_000  # elements: more than a ring holds


class NoCopies(TorchDispatchMode):
    """Where this is on, tensors can not be copied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            raise RuntimeError("no copies")
        return func(*args, **kwargs or {})


def _group() -> Any:
    """A group whose messages take the long way, which copies by torch."""
    os.environ["UNISONO_FUSED"] = "0"
    try:
        group = dist.new_group()
        dist.barrier(group)
    finally:
        del os.environ["UNISONO_FUSED"]
    return group


def _sends(rank: int, world_size: int, numel: int) -> list[float]:
    group = _group()
    if rank == 0:
        with NoCopies(), pytest.raises(RuntimeError, match="a message could not be copied: RuntimeError: no copies"):
            dist.send(torch.zeros(numel), 1, group)
        dist.send(torch.full((4,), 7.0), 1, group)
        return []
    x = torch.zeros(4)
    dist.recv(x, 0, group)
    return x.tolist()


@pytest.mark.parametrize("numel", [4, _LONG])
def test_a_message_that_can_not_be_sent_is_withdrawn(numel: int) -> None:
    assert ranks(2).run(_sends, numel) == [[], [7.0] * 4]


def _receives(rank: int, world_size: int, numel: int, aside: bool) -> list[list[float]]:
    group, x = _group(), torch.zeros(4)
    if rank == 0:
        dist.send(torch.full((numel,), 5.0), 1, group)
        for value in (6.0, 7.0):
            dist.send(torch.full((4,), value), 1, group, tag=1)
        dist.barrier(group)
        return []
    found = []
    if aside:
        dist.recv(x, 0, group, tag=1)
        found.append(x.tolist())
    with NoCopies(), pytest.raises(RuntimeError, match="a message could not be copied: RuntimeError: no copies"):
        dist.recv(torch.zeros(numel), 0, group)
    time.sleep(0.1 * (numel == _LONG))  # nobody but the worker drains
    dist.barrier(group)
    for _ in range(2 - aside):
        dist.recv(x, 0, group, tag=1)
        found.append(x.tolist())
    return found


@pytest.mark.parametrize(("numel", "aside"), [(4, False), (4, True), (_LONG, False)])
def test_a_message_that_can_not_be_received_is_dropped_and_the_next_ones_come(numel: int, aside: bool) -> None:
    assert ranks(2).run(_receives, numel, aside) == [[], [[6.0] * 4, [7.0] * 4]]
