"""Connections of a group: a stranger who takes the place of a peer is found out, and nobody connects later."""

import os
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.backend.stores import JobStore
from unisono.errors import PeerLostError
from unisono.transport import handshake
from unisono.transport.handshake import Peer, connect_gloo, make_gloo
from unisono.transport.listening import Listener, listeners

HERE = "127.0.0.1"


def connected(rank: int, size: int, meeting: str, nonce: str, seconds: float = 20.0) -> Any:
    store: Any = dist.FileStore(meeting, size)
    peers = [Peer(f"rank {each}", HERE) for each in range(size)]
    return connect_gloo(JobStore(store, "mesh"), rank, peers, nonce, seconds, 15.0, lambda: None)


def takes_places(rank: int, world_size: int, meeting: str) -> tuple[int, list[float], bool]:
    """A stranger connects to the first listener of each rank, ahead of the peer, in every rank's name."""
    strangers: list[socket.socket] = []
    create: Any = handshake.ProcessGroupGloo.create_device

    def create_after(hostname: str) -> Any:
        before = listeners()
        device = create(hostname=hostname)
        if not strangers:
            (new,) = listeners() - before
            for number in range(world_size):
                strangers.append(socket.create_connection((HERE, new.port)))
                strangers[-1].sendall(struct.pack("<q", number))
            time.sleep(0.2)
        return device

    before = listeners()
    with patch.object(handshake, "ProcessGroupGloo") as gloo:
        gloo.side_effect = dist.ProcessGroupGloo
        gloo._Options, gloo.create_device = dist.ProcessGroupGloo._Options, create_after  # type: ignore[attr-defined]
        found = connected(rank, world_size, meeting, "a nonce", 9.0)
    x = torch.tensor([float(rank)])
    y = torch.zeros(1)
    works = [found.engine.recv([y], 1 - rank, 1), found.engine.send([x], 1 - rank, 1)]
    for work in works:
        work.wait()
    refused = all(map(refuses, listeners() - before))
    for stranger in strangers:
        stranger.close()
    dist.barrier()
    return gloo.call_count, y.tolist(), refused


def refuses(own: Listener) -> bool:
    """True if nobody can connect to a listener of this process."""
    with socket.socket(fileno=os.dup(own.fd)) as listening, socket.socket(listening.family) as late:
        late.settimeout(0.2)
        return late.connect_ex(listening.getsockname()) != 0


def made_by_itself(rank: int, world_size: int, meeting: str) -> tuple[list[float], int, bool]:
    store, before = dist.FileStore(meeting, world_size), listeners()
    with socket.create_server((HERE, 0)) as other:  # of the program itself
        gloo = make_gloo(store, rank, world_size, timedelta(seconds=20))
        x = torch.tensor([rank + 1.0])
        gloo.allreduce([x]).wait()
        own = [each for each in listeners() - before if each.port != other.getsockname()[1]]
        refused = all(map(refuses, own))
        socket.create_connection(other.getsockname(), 1.0).close()
        gloo.barrier().wait()
    return x.tolist(), len(own), refused


def test_other_groups_of_gloo_take_nobody_later(tmp_path: Path) -> None:
    assert ranks(2).run(made_by_itself, str(tmp_path / "meeting")) == [([3.0], 1, True)] * 2


def test_a_stranger_in_the_place_of_a_peer_is_dropped(tmp_path: Path) -> None:
    first, second = ranks(2).run(takes_places, str(tmp_path / "meeting"))
    assert first == (2, [1.0], True)
    assert second == (2, [0.0], True)


def knows_another_nonce(rank: int, world_size: int, meeting: str) -> str:
    with pytest.raises(PeerLostError) as found:
        connected(rank, world_size, meeting, f"nonce {rank}")
    dist.barrier()
    return str(found.value)


def test_a_peer_without_the_nonce_is_refused(tmp_path: Path) -> None:
    for words in ranks(2).run(knows_another_nonce, str(tmp_path / "meeting")):
        assert "does not know its nonce" in words
