import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.trace.collect import busy_clock


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_computing_counts_and_standing_still_does_not() -> None:
    clock = busy_clock(threading.current_thread())
    began = clock()
    compute(0.02)
    assert clock() - began >= 19e6
    began, since = clock(), time.monotonic_ns()
    threading.Event().wait(0.05)
    busy, passed = clock() - began, time.monotonic_ns() - since
    assert passed - busy >= 40e6


def test_another_thread_can_read_it() -> None:
    go, done = threading.Event(), threading.Barrier(2)

    def work() -> None:
        go.wait()
        compute(0.01)
        done.wait()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    clock = busy_clock(thread)
    began = clock()
    go.set()
    done.wait()
    assert clock() - began >= 9e6
    done.wait()
    thread.join()


def share_counted(clock: Callable[[], int]) -> float:
    """The part of the elapsed time that the clock has counted over 20 ms of computing."""
    began, since = clock(), time.monotonic_ns()
    compute(0.02)
    passed = time.monotonic_ns() - since  # first: this thread may lose its core between the two
    return (clock() - began) / passed


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell who waits for a core")
def test_waiting_for_a_core_counts() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen(
        [sys.executable, "-SEc", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )  # on the same core
    try:
        assert rival.stdout is not None
        rival.stdout.readline()
        shares = [share_counted(busy_clock(threading.current_thread())) for _ in range(5)]
        # On average the rival has half the time. The median, for the host of a virtual machine may take a core away
        # for tens of milliseconds, which its kernel counts as neither on a core nor waiting for one.
        assert statistics.median(shares) >= 0.8, shares
    finally:
        rival.kill()
        rival.communicate()
        os.sched_setaffinity(0, cores)
