"""Groups whose calls are made in and out of `torch.inference_mode`: neither may spoil the other."""

import os
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.backend.process_group import UnisonoProcessGroup
from unisono.backend.work import PendingWork

SIZES = (4, 100_000)


def fresh_group(loops: str) -> dist.ProcessGroup:
    """Make a group, with compiled loops or without, whose first call is made in the mode."""
    os.environ["UNISONO_FUSED"] = loops
    try:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        with torch.inference_mode():
            dist.barrier(group=group)
        return group
    finally:
        del os.environ["UNISONO_FUSED"]


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=1)[:, 0]


def calls(group: dist.ProcessGroup, lay: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
    """Whether each operation gives what it should, of each dtype and size; inputs are all ones."""
    size, seen = dist.get_world_size(), []
    for dtype in (torch.float32, torch.int16, torch.uint16, torch.bfloat16):
        for count in SIZES:
            one = lay(torch.ones(count, dtype=dtype))
            total, many = one.clone(), [torch.zeros_like(one) for _ in range(size)]
            dist.all_reduce(total, group=group)
            seen.append(bool((total.to(torch.int64) == size).all()))
            dist.all_gather(many, one, group=group)
            seen.append(all(bool((x.to(torch.int64) == 1).all()) for x in many))
            part = torch.zeros_like(one)
            dist.reduce_scatter(part, many, group=group)
            seen.append(bool((part.to(torch.int64) == size).all()))
    return seen


def first_inside(rank: int, world_size: int, loops: str) -> list[bool]:
    group, seen = fresh_group(loops), []
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            for lay in (torch.clone, strided):
                seen += calls(group, lay)
    dist.destroy_process_group(group)
    return seen


def waited_outside(rank: int, world_size: int, loops: str, worker: bool) -> list[list[float]]:
    """Issue calls before the peers do, in the mode, and wait outside of it or once the worker has carried them."""
    group, seen = fresh_group(loops), []
    for lay in (torch.clone, strided):
        dist.barrier()
        if rank == world_size - 1:
            time.sleep(0.02)
        with torch.inference_mode():
            total, sent, got = (lay(torch.full((3,), float(x))) for x in (1, rank, -1))
            works = [dist.all_reduce(total, group=group, async_op=True)]
            works.append(dist.irecv(got, (rank - 1) % world_size, group=group))
            works.append(dist.isend(sent, (rank + 1) % world_size, group=group))
            while worker and isinstance(works[0], PendingWork) and not works[0]._task.done:
                time.sleep(0.001)
        for work in works:
            work.wait()
        seen += [total.tolist(), got.tolist()]
    dist.destroy_process_group(group)
    return seen


def by_loops(rank: int, world_size: int) -> list[float]:
    """Make calls, in the mode, of which none may take the long way; return what they give."""
    group = fresh_group("now")
    with torch.inference_mode():
        total, part, sent = torch.ones(3), torch.zeros(1), torch.full((2,), float(rank))
        gathered = [torch.zeros(2) for _ in range(world_size)]
        with patch.object(UnisonoProcessGroup, "_general", None):
            dist.all_reduce(total, group=group)
            dist.reduce_scatter(part, [total[r : r + 1] for r in range(world_size)], group=group)
            dist.all_gather(gathered, sent, group=group)
    dist.destroy_process_group(group)
    return [*total.tolist(), *part.tolist(), *torch.cat(gathered).tolist()]


def sparse(rank: int, world_size: int) -> list[list[float]]:
    """Sum sparse tensors made in the mode, in and out of it."""
    seen = []
    for inside in (True, False):
        with torch.inference_mode():
            x = torch.sparse_coo_tensor(torch.tensor([[0, rank, 0]]), torch.ones(3), (3,), check_invariants=True)
        with torch.inference_mode(inside):
            dist.all_reduce(x)
        with torch.inference_mode():
            seen.append(x.to_dense().tolist())
    return seen


def lazy(rank: int, world_size: int) -> list[list[complex]]:
    """Pass views that are conjugated or negated lazily, made in the mode, to calls in and out of it."""
    group, options, seen = dist.distributed_c10d._get_default_group(), dist.BroadcastOptions(), []
    options.rootRank = 1
    for inside in (True, False):
        with torch.inference_mode():
            x, y = torch.full((2, 2), complex(1, rank))
        with torch.inference_mode(inside):
            group.broadcast([x.conj() if rank else x], options)  # torch's own functions refuse these
            dist.all_reduce(y.conj().imag)
        seen += [x.tolist(), y.tolist()]
    return seen


@pytest.mark.parametrize("loops", ["1", "0"])
def test_a_group_first_used_in_inference_mode_serves_all(loops: str) -> None:
    for seen in ranks(2).run(first_inside, loops):
        assert len(seen) == 3 * 2 * 4 * 2 * 3
        assert all(seen)


@pytest.mark.parametrize("worker", [False, True], ids=["waited", "worker"])
@pytest.mark.parametrize("loops", ["1", "0"])
def test_a_call_issued_in_inference_mode_ends_outside(loops: str, worker: bool) -> None:
    for rank, seen in enumerate(ranks(2).run(waited_outside, loops, worker)):
        assert seen == [[2.0] * 3, [float(1 - rank)] * 3] * 2


def test_compiled_loops_take_inference_tensors() -> None:
    assert ranks(2).run(by_loops) == [[2.0] * 3 + [4.0] + [0.0, 0.0, 1.0, 1.0]] * 2


def test_sparse_inference_tensors() -> None:
    assert ranks(2).run(sparse) == [[[5.0, 1.0, 0.0]] * 2] * 2


def test_lazily_conjugated_inference_tensors() -> None:
    assert ranks(2).run(lazy) == [[[x] * 2, [1 + 1j] * 2] * 2 for x in (1 - 1j, 1 + 1j)]
