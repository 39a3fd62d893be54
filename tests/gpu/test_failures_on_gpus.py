"""What fails on one of two GPUs, a process for each: a kernel that can not be compiled, another current GPU, a stopped
rank, a killed one and the group of the rank that is left.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from gpu.test_two_gpus import both, until_raised
from gpu.world import NEEDS_GPU
from ranks import ranks
from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError, UnisonoError, UsageError

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]


def fail(*_: object) -> Any:
    raise UsageError("no room")


def compiles_nothing(rank: int, world_size: int) -> tuple[bool, list[bool]]:
    """Rank 1 can not compile the kernels of messages; whether there are kernels, whether values are right."""
    from unisono.gpu import messages

    torch.cuda.set_device(rank)
    group: Any = dist.new_group(backend="unisono")
    before = messages.compiled
    messages._loaded.cache_clear()
    if rank:
        messages.compiled = fail
    try:
        x = torch.full((1000,), 1.0 + rank, device="cuda")
        dist.all_reduce(x, group=group)
        y = torch.empty(1000, device="cuda")
        ops = [dist.P2POp(dist.isend, x + rank, 1 - rank, group), dist.P2POp(dist.irecv, y, 1 - rank, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return group._cuda.kernels is not None, [bool((x == 3).all()), bool((y == 4 - rank).all())]
    finally:
        messages.compiled = before
        messages._loaded.cache_clear()


def test_a_rank_that_compiles_nothing_leaves_all_to_nccl() -> None:
    assert ranks(2).run(compiles_nothing, timeout=200) == [(False, [True, True])] * 2


def a_kernel_fails(rank: int) -> str:
    if rank:
        from unisono.gpu import kernels

        kernels.compiled = fail
    dist.all_reduce(torch.ones(4321, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def test_a_kernel_that_can_not_be_compiled_ends_both(tmp_path: Path) -> None:
    found = both(tmp_path, a_kernel_fails)
    assert found[1][0] == "UsageError: no room"
    assert found[0][0].startswith(MismatchError.__name__)
    assert "-> rank 1: all_reduce() refused its arguments" in found[0][0]


def on_the_other_gpu(rank: int, world_size: int) -> list[bool]:
    """Calls on the group's GPU while the current one is the peer's."""
    mine, right = torch.device("cuda", rank), []
    torch.cuda.set_device(rank)
    dist.all_reduce(torch.ones(10, device=mine))
    torch.cuda.set_device(1 - rank)
    for count in (10, 77, 300_000, 8 << 20):
        x, whole = torch.full((count,), 1.0 + rank, device=mine), torch.empty(2 * count, device=mine)
        dist.all_gather_into_tensor(whole, x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        right += [bool((x == 3).all()), whole.double().sum().item() == 3 * count]
        y = torch.empty(count, device=mine)
        for message in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
        ):
            message.wait()
        right.append(bool((y == 4 - rank).all()))
    torch.cuda.set_device(rank)
    return right


def test_another_current_gpu() -> None:
    assert ranks(2).run(on_the_other_gpu, timeout=100) == [[True] * 12] * 2


def stopped(rank: int) -> str:
    if rank:
        pid = os.getpid()
        if not os.fork():
            time.sleep(9)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
        return "went on"
    dist.all_reduce(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    words, seconds, after = both(tmp_path, stopped, timeout=4.0)[0]
    assert words.startswith(CollectiveTimeout.__name__)
    assert "rank 1 missing" in words
    assert "stopped" in words
    assert 3.5 < seconds < 8
    assert after == 6


def goes_on_alone(rank: int) -> str:
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    first = ""
    try:
        dist.all_reduce(torch.ones(1000, device="cuda"))
        torch.cuda.synchronize()
        until_raised()
    except UnisonoError as error:
        first = type(error).__name__
    unisono.shrink()
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    return f"{first}, then {dist.get_world_size()} rank, {x.sum().item()}"


def test_a_group_shrinks(tmp_path: Path) -> None:
    assert both(tmp_path, goes_on_alone)[0][0] == f"{PeerLostError.__name__}, then 1 rank, 1000.0"
