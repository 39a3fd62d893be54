"""The pool of rank processes keeps its promises: reuse, tracebacks, stacks of what hangs, renewal."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, ranks


def total(rank: int, world_size: int, scale: int) -> tuple[int, list[float]]:
    x = torch.full((4,), float(rank) * scale)
    dist.all_reduce(x)
    return os.getpid(), x.tolist()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")


def sleep_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(100)


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def initialized(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def test_processes_are_reused_across_world_sizes() -> None:
    three = ranks(3).run(total, 2)
    two = ranks(2).run(total, 1)
    assert [values for _, values in three] == [[6.0] * 4] * 3
    assert [values for _, values in two] == [[1.0] * 4] * 2
    assert [pid for pid, _ in two] == [pid for pid, _ in three[:2]]


def test_no_group_on_request() -> None:
    assert ranks(2, group=False).run(initialized) == [False, False]
    assert ranks(2).run(initialized) == [True, True]


def test_an_exception_comes_with_the_traceback_of_its_rank() -> None:
    with pytest.raises(RankFailure, match="rank one is unhappy") as caught:
        ranks(2, group=False).run(fail_on_one)
    assert "in fail_on_one" in caught.value.failures[1]
    assert 0 not in caught.value.failures


def test_a_hang_is_cut_with_its_stack() -> None:
    with pytest.raises(RankFailure, match="no end after 1 s") as caught:
        ranks(2, group=False).run(sleep_on_one, timeout=1)
    assert "in sleep_on_one" in caught.value.failures[1]


def test_a_death_is_named_and_the_pool_renewed() -> None:
    with pytest.raises(RankFailure, match="exit status -9"):
        ranks(2, group=False).run(die_on_one)
    assert [values for _, values in ranks(2).run(total, 1)] == [[1.0] * 4] * 2
