"""Rings between processes: large and small messages, both ways at once; ranks that die, leave or do not come."""

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, ranks
from unisono.errors import CollectiveTimeout, PeerLostError, UsageError
from unisono.transport.shared_memory import SharedMemory


def joined(rank: int, world_size: int, path: str, timeout: float = 20.0) -> SharedMemory:
    return SharedMemory(dist.FileStore(path, world_size), rank, world_size, timeout)


def exchange(rank: int, world_size: int, path: str) -> bool:
    transport, peers = joined(rank, world_size, path), [p for p in range(world_size) if p != rank]
    right = True
    for numel in (1, 3, 1_000_000, 77):
        mine = torch.arange(numel, dtype=torch.int32) * (rank + 1)
        came = {peer: torch.empty(numel, dtype=torch.int32) for peer in peers}
        waits = transport.post([(peer, mine) for peer in peers], list(came.items()))
        for wait in reversed(waits):
            wait()
        right &= all(torch.equal(x, torch.arange(numel, dtype=torch.int32) * (p + 1)) for p, x in came.items())
    transport.close()
    return right


def test_everybody_with_everybody_beyond_the_rings_size(tmp_path: Path) -> None:
    assert ranks(3, group=False).run(exchange, str(tmp_path / "store")) == [True] * 3


def lose(rank: int, world_size: int, path: str, how: str) -> str:
    transport = joined(rank, world_size, path, 0.3 if how == "late" else 20.0)
    x = torch.ones(10_000_000 if how == "full" else 4)
    if rank == 1:
        if how == "leaves":
            transport.send(0, x)
            transport.close()
        elif how != "late":
            os._exit(3)
        else:
            time.sleep(0.6)
        return ""
    try:
        if how == "leaves":
            transport.receive(1, x)  # was sent before: still comes
        (transport.send if how == "full" else transport.receive)(1, x)
    except (PeerLostError, CollectiveTimeout) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_peer_that_leaves_or_is_late_is_named(tmp_path: Path) -> None:
    left = ranks(2, group=False).run(lose, str(tmp_path / "a"), "leaves")[0]
    assert left == "PeerLostError: rank 0: 0 of 16 bytes from rank 1 have passed, and rank 1 has left"
    late = ranks(2, group=False).run(lose, str(tmp_path / "b"), "late")[0]
    assert late == "CollectiveTimeout: rank 0: 0 of 16 bytes from rank 1 have passed in 0.3 s"


@pytest.mark.parametrize("how", ["dies", "full"])
def test_a_peer_that_dies_is_named(tmp_path: Path, how: str) -> None:
    told = str(tmp_path / "told")
    with pytest.raises(RankFailure):
        ranks(2, group=False).run(tell, str(tmp_path / "store"), how, told)
    assert re.search(r"rank 1 \(pid \d+\) is dead", Path(told).read_text())


def tell(rank: int, world_size: int, path: str, how: str, told: str) -> None:
    words = lose(rank, world_size, path, how)
    Path(told).write_text(words)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(CollectiveTimeout, match=r"rank 0 waited 0.05 s for ranks 1, 2 of 3 to come"):
        SharedMemory(store, 0, 3, timeout=0.05)
    with pytest.raises(UsageError, match="no rank 3 among 3"):
        SharedMemory(store, 3, 3)
