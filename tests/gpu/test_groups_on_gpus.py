"""Groups made of another one's ranks, on two GPUs: new_group, split_group, DeviceMesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.world import NEEDS_GPU
from ranks import ranks

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]


def total(group: Any, rank: int) -> float:
    """The sum over a group of 1 and 2, of ranks 0 and 1, on GPUs."""
    x = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(x, group=group)
    return x[999].item()


def new_groups(rank: int, world_size: int) -> list[float]:
    """Of each rank alone, of both, and of both by the store of the members only; all alive at once."""
    torch.cuda.set_device(rank)
    alone = [dist.new_group([member]) for member in range(world_size)]
    whole = dist.new_group([0, 1])
    local = dist.new_group([0, 1], use_local_synchronization=True)
    found = [total(group, rank) for group in (alone[rank], whole, local, None)]
    x = torch.full((10,), float(rank), device="cuda")
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank, whole), dist.P2POp(dist.irecv, y := torch.empty_like(x), 1 - rank, whole)]
    )
    for work in works:
        work.wait()
    for group in (alone[rank], whole, local):
        dist.destroy_process_group(group)
    return [*found, y[0].item(), total(None, rank)]


def split(rank: int, world_size: int) -> list[float | None]:
    torch.cuda.set_device(rank)
    each: Any = dist.split_group(split_ranks=[[0], [1]], group_desc="each")
    both: Any = dist.split_group(split_ranks=[[1, 0]])
    first = dist.split_group(split_ranks=[[0]])
    of_both: Any = dist.split_group(both, [[0], [1]])
    found = [total(group, rank) if group is not None else None for group in (each, both, first, of_both)]
    cpu = torch.full((3,), rank + 1.0)
    dist.all_reduce(cpu, group=both)
    return [*found, cpu[0].item()]


def mesh(rank: int, world_size: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(rank)
    grid = init_device_mesh("cuda", (2, 1), mesh_dim_names=("outer", "inner"))
    whole = grid["outer", "inner"]._flatten("all")
    return [total(grid.get_group("outer"), rank), total(grid.get_group("inner"), rank), total(whole.get_group(), rank)]


def test_new_groups_of_subsets() -> None:
    found = ranks(2).run(new_groups, timeout=200)
    assert found == [[1.0, 3.0, 3.0, 3.0, 1.0, 3.0], [2.0, 3.0, 3.0, 3.0, 0.0, 3.0]]


def test_split_group() -> None:
    found = ranks(2).run(split, timeout=200)
    assert found == [[1.0, 3.0, 1.0, 1.0, 3.0], [2.0, 3.0, None, 2.0, 3.0]]


def test_a_device_mesh() -> None:
    assert ranks(2).run(mesh, timeout=200) == [[3.0, 1.0, 3.0], [3.0, 2.0, 3.0]]
