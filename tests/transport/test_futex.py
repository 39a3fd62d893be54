"""How a rank waits: giving way while that is cheap, asleep where others want its core."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.transport import futex


@pytest.fixture
def free() -> Iterator[None]:
    """Nobody wants this core, as far as this process knows."""
    before, futex.CROWDED.value = futex.CROWDED.value, 0
    yield
    futex.CROWDED.value = before


def test_a_dear_yield_is_not_repeated_for_a_while(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1) or time.sleep(2e-9 * futex.DEAR))
    assert futex.give_way()
    assert not futex.give_way()
    assert len(yields) == 1
    futex.CROWDED.value = time.monotonic_ns() - 1
    assert futex.give_way()
    assert len(yields) == 2


def test_a_cheap_yield_is_repeated(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: None)
    assert all(futex.give_way() for _ in range(100))


def durations(rank: int, world_size: int) -> list[float]:
    x, found, other = torch.ones(4), [], torch.zeros(1)
    for _ in range(150):
        begun = time.perf_counter()
        dist.all_reduce(x)
        if rank == 0:
            dist.send(other, 1)
            dist.recv(other, 1)
        else:
            dist.recv(other, 0)
            dist.send(other, 0)
        found.append(time.perf_counter() - begun)
    return found


def test_busy_processes_beside_the_ranks_do_not_hold_them_up() -> None:
    """Each yield to one of these takes a slice of the scheduler's, 3 or 4 ms; three of them are in every round."""
    pool, cores = ranks(2), os.cpu_count() or 1
    pool.run(durations)
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(cores)]
    try:
        first, second = pool.run(durations)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert statistics.median(first) < 0.004
    assert statistics.median(second) < 0.004
