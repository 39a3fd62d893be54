"""Collectives of Python objects bring every rank exactly the objects, tensors and own classes included."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import ranks


@dataclass
class Thing:
    """An object of the user's own class."""

    name: str
    payload: Any


def thing(rank: int) -> Any:
    """A different kind and size of object on every rank; rank 2's is larger than any staging buffer."""
    kinds = (
        {"rank": rank, "nested": [1, (2, "three"), None]},
        Thing("π", {"values": [1.5, float("inf")]}),
        Thing("large", bytes(range(256)) * 20_000),
        None,
    )
    return kinds[rank % len(kinds)]


def collect(rank: int, world_size: int) -> dict[str, Any]:
    everybody: list[Any] = [None] * world_size
    dist.all_gather_object(everybody, thing(rank))
    at_one: list[Any] | None = [None] * world_size if rank == 1 else None
    dist.gather_object(thing(rank), at_one, dst=1)
    from_last = [thing(world_size - 1), thing(0)] if rank == world_size - 1 else [None, None]
    dist.broadcast_object_list(from_last, src=world_size - 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [thing(peer) for peer in range(world_size)] if rank == 0 else None, src=0)
    return {"everybody": everybody, "at one": at_one, "from last": from_last, "mine": mine[0]}


@pytest.mark.parametrize("world_size", [2, 4])
def test_object_collectives(world_size: int) -> None:
    everything = [thing(rank) for rank in range(world_size)]
    for rank, result in enumerate(ranks(world_size).run(collect)):
        assert result == {
            "everybody": everything,
            "at one": everything if rank == 1 else None,
            "from last": [thing(world_size - 1), thing(0)],
            "mine": thing(rank),
        }


def gather_tensors(rank: int, world_size: int) -> list[torch.Tensor]:
    everybody: list[Any] = [None] * world_size
    dist.all_gather_object(everybody, torch.full((rank, 2), rank, dtype=torch.int16))
    return everybody


def test_tensors_as_objects() -> None:
    for result in ranks(3).run(gather_tensors):
        for rank, tensor in enumerate(result):
            assert torch.equal(tensor, torch.full((rank, 2), rank, dtype=torch.int16))


def pass_round(rank: int, world_size: int) -> list[Any]:
    """Send this rank's object to the next rank, even ranks first."""
    received: list[Any] = [None, None]
    onward = [thing(rank), rank]
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    if rank % 2 == 0:
        dist.send_object_list(onward, dst=after)
        dist.recv_object_list(received, src=before)
    else:
        dist.recv_object_list(received, src=before)
        dist.send_object_list(onward, dst=after)
    return received


def test_objects_from_rank_to_rank() -> None:
    results = ranks(4).run(pass_round)
    assert results == [[thing((rank - 1) % 4), (rank - 1) % 4] for rank in range(4)]


def collect_in_group(rank: int, world_size: int) -> list[Any] | None:
    odd = dist.new_group([1, 3])
    if rank % 2 == 0:
        return None
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, thing(rank), group=odd)
    dist.destroy_process_group(odd)
    return everybody


def test_objects_in_a_group() -> None:
    assert ranks(4).run(collect_in_group) == [None, [thing(1), thing(3)], None, [thing(1), thing(3)]]
