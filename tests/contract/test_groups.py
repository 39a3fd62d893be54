"""Groups: nested, overlapping, made by members only, ended in any order, meshes of them, one default after another."""

import datetime
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import BACKEND, ranks
from unisono.errors import MismatchError

TIMEOUT = datetime.timedelta(seconds=20)


def total(group: Any, rank: int) -> int:
    x = torch.tensor([1 << rank])
    dist.all_reduce(x, group=group)
    return int(x)


def nested(rank: int, world_size: int) -> list[int]:
    """Halve the world again and again; every group's sum names its members."""
    members = list(range(world_size))
    sums, made = [], []
    while len(members) > 1:
        members = members[: len(members) // 2] if len(members) % 2 else members[len(members) // 2 :]
        group = dist.new_group(members)
        if rank in members:
            sums.append(total(group, rank) - sum(1 << r for r in members))
            made.append(group)
    for group in made:  # the outer groups first
        dist.destroy_process_group(group)
    return sums


def described(rank: int, world_size: int) -> list[str]:
    """The first lines of errors in groups that have names of the program's, and in one that has none."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    lines = []
    for group in (dist.new_group(group_desc="my pipe"), mesh.get_group("tp"), dist.new_group()):
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(1 + rank), group=group)
        lines.append(str(caught.value).partition("\n")[0])
    return lines


def overlapping(rank: int, world_size: int) -> list[int]:
    """All pairs are groups at once; calls on them interleave, each rank visiting its pairs in the common order."""
    pairs = [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    errors = []
    for _ in range(3):
        works = []
        for pair, group in groups.items():
            if rank in pair:
                x = torch.full((100,), 1 << rank)
                works.append((pair, x, dist.all_reduce(x, group=group, async_op=True)))
        dist.barrier()
        for pair, x, work in reversed(works):
            work.wait()
            errors.append(int(x[0]) - sum(1 << r for r in pair))
    for pair in reversed(pairs) if rank % 2 else pairs:  # ended in another order on every other rank
        if rank in pair:
            dist.destroy_process_group(groups[pair])
    return errors


def members_only(rank: int, world_size: int) -> list[int]:
    """Only the members call new_group; the others are elsewhere meanwhile."""
    sums = []
    for members in ([0, world_size - 1], list(range(1, world_size))):
        if rank in members:
            group = dist.new_group(members, use_local_synchronization=True)
            sums.append(total(group, rank) - sum(1 << r for r in members))
            dist.destroy_process_group(group)
    return sums


def ranks_in_any_order(rank: int, world_size: int) -> tuple[list[int], int]:
    """torch sorts the ranks of a group unless told otherwise; roots and results follow the group's own order."""
    members = list(reversed(range(world_size)))
    group = dist.new_group(members)
    parts = [torch.empty(1, dtype=torch.int64) for _ in members]
    dist.all_gather(parts, torch.tensor([rank]), group=group)
    x = torch.tensor([rank])
    dist.broadcast(x, group_src=world_size - 1, group=group)
    order = dist.get_process_group_ranks(group)
    assert [int(part) for part in parts] == order
    dist.destroy_process_group(group)
    return order, int(x)


def not_a_member(rank: int, world_size: int) -> Any:
    group = dist.new_group([0])
    seen = group is dist.GroupMember.NON_GROUP_MEMBER, dist.get_rank(group)
    if rank == 0:
        dist.destroy_process_group(group)
    return seen


def mesh(rank: int, world_size: int) -> list[Any]:
    """A mesh of 2 × n/2: sums along either axis, of submeshes and of the flattened mesh."""
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("outer", "inner"))
    row, column = divmod(rank, world_size // 2)
    outer = total(grid.get_group("outer"), rank)
    inner = total(grid["inner"].get_group(), rank)
    everyone = total(grid["outer", "inner"]._flatten("all").get_group(), rank)
    return [
        grid.get_coordinate() == [row, column] or list(grid.get_coordinate()) == [row, column],
        outer == sum(1 << (r * (world_size // 2) + column) for r in range(2)),
        inner == sum(1 << (row * (world_size // 2) + c) for c in range(world_size // 2)),
        everyone == (1 << world_size) - 1,
        grid.get_group("outer").name() if hasattr(grid.get_group("outer"), "name") else BACKEND,
    ]


def split(rank: int, world_size: int) -> str:
    """torch 2.13 splits only groups bound to an accelerator; it is torch that says so, before any backend is asked."""
    try:
        dist.split_group(split_ranks=[list(range(world_size))])
    except RuntimeError as error:
        return str(error)
    return "split"


def many_defaults(rank: int, world_size: int, directory: str) -> list[int]:
    """Start and end several default groups one after another, with a subgroup left over each time."""
    sums = []
    for i in range(4):
        dist.init_process_group(BACKEND, init_method=f"file://{directory}/{i}", rank=rank, world_size=world_size)
        group = dist.new_group(sorted({0, world_size - 1}))
        sums.append(total(None, rank))
        if rank in (0, world_size - 1):
            total(group, rank)
        if i % 2:
            dist.barrier()
        dist.destroy_process_group()
    return sums


def nothing_left(rank: int, world_size: int, directory: str) -> tuple[int, int]:
    """Return how many file descriptors and maps of shared memory a group leaves behind once it is destroyed."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("/dev/shm/" in line or "memfd:" in line for line in maps)

    for i in range(2):
        if i:
            before = held()
        dist.init_process_group(BACKEND, init_method=f"file://{directory}/{i}", rank=rank, world_size=world_size)
        x = torch.ones(100_000)
        dist.all_reduce(x)
        dist.send(x, (rank + 1) % world_size) if rank == 0 else dist.recv(x, rank - 1) if rank == 1 else None
        dist.barrier()
        dist.destroy_process_group()
    after = held()
    return after[0] - before[0], after[1] - before[1]


STORES: dict[str, Callable[[int, int, str], dist.Store]] = {
    "FileStore": lambda rank, size, where: dist.FileStore(where, size),
    "TCPStore": lambda rank, size, where: tcp_store(rank, size, where),
    "PrefixStore": lambda rank, size, where: dist.PrefixStore("ours", dist.FileStore(where, size)),
    "nested PrefixStore": lambda rank, size, where: dist.PrefixStore(
        "a", dist.PrefixStore("b", tcp_store(rank, size, where))
    ),
    "HashStore": lambda rank, size, where: dist.HashStore(),
}


def tcp_store(rank: int, size: int, where: str) -> dist.TCPStore:
    """Rank 0 serves on a port the system chooses and leaves its number in a file."""
    place = Path(where + ".port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, TIMEOUT, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
        return store
    while not place.exists():
        os.sched_yield()
    return dist.TCPStore("127.0.0.1", int(place.read_text()), size, False, TIMEOUT, wait_for_workers=False)


def explicit_store(rank: int, world_size: int, name: str, directory: str) -> int:
    store = STORES[name](rank, world_size, f"{directory}/store")
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    result = total(None, rank)
    dist.barrier()
    dist.destroy_process_group()
    return result


several = pytest.mark.parametrize("world_size", [2, 3, 5, 8], indirect=True)


def test_nested(world_size: int) -> None:
    assert all(not any(errors) for errors in ranks(world_size).run(nested))


def test_errors_name_a_group_as_the_program_does() -> None:
    for mine, of_mesh, other in ranks(4).run(described):
        assert re.search(r"group \S+ \[[0-9, ]+\] \(my pipe\) disagree about call no. 1:", mine)
        assert re.search(r"group \S+ \[[0-9, ]+\] \(mesh_tp\) disagree about call no. 1:", of_mesh)
        assert re.search(r"group \S+ \[[0-9, ]+\] disagree about call no. 1:", other)


@several
def test_overlapping_pairs(world_size: int) -> None:
    assert ranks(world_size).run(overlapping) == [[0] * 3 * (world_size - 1)] * world_size


@several
def test_made_by_members_only(world_size: int) -> None:
    assert all(not any(errors) for errors in ranks(world_size).run(members_only))


@several
def test_ranks_in_any_order(world_size: int) -> None:
    (order, source), *others = ranks(world_size).run(ranks_in_any_order)
    assert sorted(order) == list(range(world_size))
    assert source == order[-1]
    assert others == [(order, source)] * (world_size - 1)


@pytest.mark.parametrize("world_size", [2], indirect=True)
def test_who_is_not_a_member(world_size: int) -> None:
    assert ranks(world_size).run(not_a_member) == [(False, 0), (True, -1)]


@pytest.mark.parametrize("world_size", [4, 8], indirect=True)
def test_device_mesh(world_size: int) -> None:
    assert ranks(world_size).run(mesh) == [[True, True, True, True, BACKEND]] * world_size


@pytest.mark.parametrize("world_size", [2], indirect=True)
def test_split_group_is_torch_s_to_refuse(world_size: int) -> None:
    assert all("No device associated" in message for message in ranks(world_size).run(split))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_default_groups(size: int, tmp_path: Path) -> None:
    assert ranks(size, group=False).run(many_defaults, str(tmp_path)) == [[(1 << size) - 1] * 4] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_destroyed_group_leaves_nothing(size: int, tmp_path: Path) -> None:
    assert ranks(size, group=False).run(nothing_left, str(tmp_path)) == [(0, 0)] * size


@pytest.mark.parametrize("name", STORES)
def test_explicit_store(name: str, tmp_path: Path) -> None:
    size = 1 if name == "HashStore" else 3
    assert ranks(size, group=False).run(explicit_store, name, str(tmp_path)) == [(1 << size) - 1] * size
