"""How a rank waits: counters that wrap and wake; giving way while that is cheap, asleep where others want its core."""

import ctypes
import itertools
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.transport import futex


def counter() -> tuple[futex.Counter, memoryview]:
    raw = mmap.mmap(-1, 4096)
    words = memoryview(raw).cast("I")
    return futex.Counter(words, 16, ctypes.addressof(ctypes.c_char.from_buffer(raw))), words


def test_a_counter_counts_and_wraps() -> None:
    count, words = counter()
    words[16] = 2**32 - 1
    count.add()
    assert count.value() == 0
    assert words[17] == 0


def test_sleep_returns_at_once_if_the_word_has_changed() -> None:
    count, _ = counter()
    count.add()
    start = time.monotonic()
    count.sleep(0, 10.0)
    assert time.monotonic() - start < 1.0


def test_only_the_last_arrival_wakes() -> None:
    count, words = counter()
    address = ctypes.addressof(ctypes.c_char.from_buffer(words.obj)) + 4 * count.index
    woken: list[float] = []

    def sleeper() -> None:
        while (seen := count.value()) != 2:
            count.sleep(seen, 5.0)
        woken.append(time.monotonic())

    thread = threading.Thread(target=sleeper)
    thread.start()
    time.sleep(0.05)
    futex.arrive(address, 2)
    time.sleep(0.05)
    assert not woken
    futex.arrive(address, 2)
    thread.join(5.0)
    assert len(woken) == 1


def test_who_sleeps_is_counted_in_the_next_word() -> None:
    count, words = counter()
    thread = threading.Thread(target=lambda: count.sleep(0, 5.0))
    thread.start()
    deadline = time.monotonic() + 5.0
    while words[17] != 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert words[17] == 1
    count.add()
    thread.join(5.0)
    assert not thread.is_alive()
    assert words[17] == 0


def test_additions_from_many_threads_are_all_counted() -> None:
    count, _ = counter()
    threads = [threading.Thread(target=lambda: [count.add() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.value() == 2000


@pytest.fixture
def free() -> Iterator[None]:
    """Nobody wants this core, as far as this process knows."""
    before, futex.OVERSUBSCRIBED_UNTIL.value = futex.OVERSUBSCRIBED_UNTIL.value, 0
    yield
    futex.OVERSUBSCRIBED_UNTIL.value = before


def test_a_dear_yield_is_not_repeated_for_a_while(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1) or time.sleep(2e-9 * futex.SLOW_YIELD_NS))
    assert futex.yield_core()
    assert not futex.yield_core()
    assert len(yields) == 1
    futex.OVERSUBSCRIBED_UNTIL.value = time.monotonic_ns() - 1
    assert futex.yield_core()
    assert len(yields) == 2


def test_a_cheap_yield_is_repeated(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(time.monotonic_ns(), 1000)  # this process may lose its core meanwhile
    monkeypatch.setattr(os, "sched_yield", lambda: None)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    assert all(futex.yield_core() for _ in range(100))


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
