"""Calls of many pieces over hosts, which overlap: their values, and calls that differ among them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hosts.conftest import Network
from hosts.test_jobs import on_ranks
from unisono.errors import MismatchError
from unisono.runtime.network import MEETING_DATA
from unisono.transport.mesh import Channel


def numbers(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random, alike on all ranks."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums(rank: int, world_size: int) -> list[str]:
    """Which sums are not in rank order, to the bit."""
    wrong = []
    for numel, dtype in ((262_144, torch.float32), (1_000_003, torch.float32), (700_001, torch.bfloat16)):
        parts = [numbers(numel, each, dtype) for each in range(world_size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        x, reduced = parts[rank].clone(), parts[rank].clone()
        dist.all_reduce(x)
        dist.reduce(reduced, world_size - 1)
        wrong += [] if torch.equal(x, total.to(dtype)) else [f"all_reduce of {numel} {dtype}"]
        if rank == world_size - 1 and not torch.equal(reduced, total.to(dtype)):
            wrong.append(f"reduce of {numel} {dtype}")
    return wrong


def uneven(rank: int, world_size: int) -> list[str]:
    """Which exchanges of pieces of other lengths for every pair, some long and some empty, are wrong."""
    wrong = []
    for base in (1000, 700_000):
        lengths = [[base * ((src + 2 * dst) % 4) for dst in range(world_size)] for src in range(world_size)]
        for _ in range(2):
            came = [torch.empty(lengths[src][rank]) for src in range(world_size)]
            dist.all_to_all(came, [numbers(lengths[rank][dst], 8 * rank + dst) for dst in range(world_size)])
            wanted = [numbers(lengths[src][rank], 8 * src + rank) for src in range(world_size)]
            wrong += [] if all(map(torch.equal, came, wanted)) else [f"all_to_all, base {base}"]
    return wrong


def differing(rank: int, world_size: int) -> list[str]:
    """What goes wrong where long calls differ on the last rank: each is a mismatch, and the group works on."""
    wrong = []
    for other in (lambda: dist.all_reduce(torch.ones(400_001)), lambda: dist.broadcast(torch.ones(400_000), 0)):
        try:
            other() if rank == world_size - 1 else dist.all_reduce(torch.ones(400_000))
            wrong.append("no error")
        except MismatchError:
            pass
        x = torch.ones(400_000)
        dist.all_reduce(x)
        wrong += [] if bool((x == world_size).all()) else ["the sum behind it"]
    return wrong


@pytest.mark.parametrize("function", [sums, uneven, differing])
def test_calls_of_many_pieces(make_hosts: Callable[..., Network], function: Callable[..., list[str]]) -> None:
    assert on_ranks(make_hosts(), 2, function) == [[]] * 4


def frames(rank: int, world_size: int, numel: int) -> int:
    """The frames of data that this rank sends for an all_reduce, of which each host has 8 pieces at least."""
    x, send, sent = torch.ones(numel), Channel.send, []
    dist.all_reduce(x)

    def counted(channel: Channel, kind: int, *parts: Any, **how: Any) -> None:
        sent.append(kind)
        send(channel, kind, *parts, **how)

    Channel.send = counted  # type: ignore[method-assign]
    dist.all_reduce(x)
    assert bool((x == world_size**2).all())
    return sent.count(MEETING_DATA)


def test_short_pieces_of_a_host_cross_in_one_frame_and_long_ones_by_all_connections(
    make_hosts: Callable[..., Network],
) -> None:
    net = make_hosts()
    short, long = (on_ranks(net, 2, frames, numel) for numel in (1 << 18, 1 << 23))
    assert short[0] == short[3] == 0
    assert short[1] == short[2] >= 8
    assert long[0] == long[1] == long[2] == long[3] >= 8
