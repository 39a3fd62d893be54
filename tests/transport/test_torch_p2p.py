"""A torch.distributed group as a transport: ranks within the group, any order of waits, lost peers, refusals."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, ranks
from unisono.algorithms import build
from unisono.errors import PeerLostError, UsageError
from unisono.runtime.run import run_over
from unisono.transport.torch_p2p import TorchP2P

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "unisono"])


def in_a_subgroup(rank: int, world_size: int) -> list[float] | str:
    group = dist.new_group([1, 3])
    try:
        if rank in (1, 3):
            transport, x = TorchP2P(group), torch.full((3,), float(rank))
            assert (transport.rank, transport.world_size) == (rank // 2, 2)
            run_over(build("ring", "all_reduce", 2), x, transport)
            with pytest.raises(UsageError, match="has no peer 2"):
                transport.send(2, x)
            return x.tolist()
        with pytest.raises(UsageError, match=f"global rank {rank} is not in this group"):
            TorchP2P(group)
        return "outside"
    finally:
        if rank in (1, 3):
            dist.destroy_process_group(group)


@BACKENDS
def test_ranks_count_within_the_group(backend: str) -> None:
    assert ranks(4, backend=backend).run(in_a_subgroup) == ["outside", [4.0] * 3, "outside", [4.0] * 3]


def test_needs_a_group() -> None:
    with pytest.raises(UsageError, match="init_process_group first"):
        TorchP2P()


def exchange(rank: int, world_size: int) -> bool:
    transport, peers = TorchP2P(), [p for p in range(world_size) if p != rank]
    right = True
    for numel in (1, 3, 1_000_000, 77):
        mine = torch.arange(numel, dtype=torch.int32) * (rank + 1)
        came = {peer: torch.empty(numel, dtype=torch.int32) for peer in peers}
        waits = transport.post([(peer, mine) for peer in peers], list(came.items()))
        for wait in reversed(waits):
            wait()
        right &= all(torch.equal(x, torch.arange(numel, dtype=torch.int32) * (p + 1)) for p, x in came.items())
    return right


@BACKENDS
def test_everybody_with_everybody_in_any_order_of_waits(backend: str) -> None:
    assert ranks(3, backend=backend).run(exchange) == [True] * 3


def lose(rank: int, world_size: int, told: str) -> None:
    transport, x = TorchP2P(), torch.ones(4)
    transport.receive(1, x) if rank == 0 else transport.send(0, x)
    if rank == 1:
        os._exit(3)
    try:
        transport.receive(1, x)
    except PeerLostError as error:
        Path(told).write_text(str(error))


@BACKENDS
def test_a_peer_that_dies_is_named(backend: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailure):
        ranks(2, backend=backend).run(lose, str(told))
    assert "rank 1" in told.read_text()
