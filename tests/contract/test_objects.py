"""The object forms carry any picklable value, of another size on every rank."""

from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ranks import BACKEND, ranks


def thing(rank: int) -> Any:
    """Return a value whose pickle differs in size from rank to rank."""
    return [None, "räksmörgås" * 50, {"rank": rank, "t": (1, 2.5)}, list(range(3000)), b"", -1, "", {1, 2}][rank]


def gathers(rank: int, world_size: int) -> list[str]:
    expected = [thing(r) for r in range(world_size)]
    problems = []
    got: list[Any] = [None] * world_size
    dist.all_gather_object(got, thing(rank))
    if got != expected:
        problems.append(f"all_gather_object: {got}")
    for root in range(world_size):
        got = [None] * world_size
        dist.gather_object(thing(rank), got if rank == root else None, dst=root)
        if got != (expected if rank == root else [None] * world_size):
            problems.append(f"gather_object to {root}: {got}")
    return problems


def broadcasts(rank: int, world_size: int) -> list[str]:
    problems = []
    for root in range(world_size):
        got = [thing(rank), {"from": rank}, rank]
        dist.broadcast_object_list(got, src=root)
        if got != [thing(root), {"from": root}, root]:
            problems.append(f"broadcast_object_list from {root}: {got}")
    return problems


def scatters(rank: int, world_size: int) -> list[str]:
    problems = []
    for root in range(world_size):
        got: list[Any] = [None]
        parts = [(root, thing(r)) for r in range(world_size)] if rank == root else None
        dist.scatter_object_list(got, parts, src=root)
        if got != [(root, thing(rank))]:
            problems.append(f"scatter_object_list from {root}: {got}")
    return problems


def places(rank: int, world_size: int) -> list[Any]:
    """Give what serves as a list, or has more places than there are ranks, under another default device."""
    longer, by_rank, queue = ["kept"] * (world_size + 1), dict.fromkeys(range(world_size)), deque([None, None])
    gathered: list[Any] = [None] * world_size
    with torch.device("meta"):
        dist.all_gather_object(longer, rank)
        dist.all_gather_object(by_rank, rank)  # type: ignore[arg-type]
        dist.broadcast_object_list(queue, src=0)  # type: ignore[arg-type]
        dist.gather_object(rank, gathered if rank == 0 else None, dst=0)
    return [longer, by_rank, len(queue), gathered]


def sends(rank: int, world_size: int) -> Any:
    """Hand a list of things from rank to rank, each adding one."""
    if world_size == 1:
        return [thing(0)]
    got: list[Any] = [None] * rank
    if rank:
        named = {"src": rank - 1} if rank % 2 else {"group_src": rank - 1}
        source = dist.recv_object_list(got, **named)
        assert source == rank - 1, source
    got.append(thing(rank))
    if rank + 1 < world_size:
        dist.send_object_list(got, dst=rank + 1)
    return got


def subgroup(rank: int, world_size: int) -> Any:
    """Tensors travel too, within a group."""
    members = list(range(world_size))[-2:]
    group = dist.new_group(members)
    got: list[Any] = [None] * len(members)
    if rank in members:
        dist.all_gather_object(got, torch.full((2,), rank), group=group)
        dist.destroy_process_group(group)
        return [x.tolist() for x in got]
    return None


def test_gather(world_size: int) -> None:
    assert ranks(world_size).run(gathers) == [[]] * world_size


def test_broadcast(world_size: int) -> None:
    assert ranks(world_size).run(broadcasts) == [[]] * world_size


def test_scatter(world_size: int) -> None:
    assert ranks(world_size).run(scatters) == [[]] * world_size


def test_send(world_size: int) -> None:
    expected = [[thing(r) for r in range(rank + 1)] for rank in range(world_size)]
    assert ranks(world_size).run(sends) == expected


def test_objects_go_to_whatever_takes_items() -> None:
    for rank, seen in enumerate(ranks(3).run(places)):
        gathered = [0, 1, 2] if rank == 0 else [None] * 3
        assert seen == [[0, 1, 2, "kept"], {0: 0, 1: 1, 2: 2}, 2, gathered]


def test_in_a_group(world_size: int) -> None:
    members = list(range(world_size))[-2:]
    expected = [[[r, r] for r in members] if rank in members else None for rank in range(world_size)]
    assert ranks(world_size).run(subgroup) == expected


def joint(rank: int, world_size: int, path: str) -> list[Any]:
    """Ranks with default groups of their own in a group made over a store, as weight updates make it."""
    dist.init_process_group(BACKEND, f"file://{path}/alone{rank}", rank=0, world_size=1)
    c10d, store = dist.distributed_c10d, dist.FileStore(f"{path}/joint", world_size)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend(BACKEND), store, group_name="joint", timeout=timedelta(seconds=20)
    )
    c10d._world.pg_group_ranks[group] = {r: r for r in range(world_size)}
    got: list[Any] = [["from", rank]]
    dist.broadcast_object_list(got, group_src=0, group=group)
    part: list[Any] = [None]
    dist.scatter_object_list(
        part, [["to", r] for r in range(world_size)] if rank == 1 else None, group=group, group_src=1
    )
    dist.barrier(group=group)
    dist.destroy_process_group()
    return [*got, *part]


def test_ranks_that_have_no_default_group_in_common(tmp_path: Path) -> None:
    assert ranks(3, group=False).run(joint, str(tmp_path)) == [[["from", 0], ["to", r]] for r in range(3)]
