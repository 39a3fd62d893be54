"""When the worker takes up what its caller has left."""

import threading
import time

import torch
import torch.distributed as dist

from ranks import ranks
from unisono.runtime.worker import Backoff


def test_what_nobody_comes_back_for_is_taken_up_after_the_shortest_time() -> None:
    backoff = Backoff()
    shortest = backoff.seconds
    assert backoff.over(idle=False, visited=False)
    assert (backoff.seconds, backoff.rests) == (shortest, False)


def test_callers_who_carry_their_calls_are_left_alone_for_longer_until_one_does_not() -> None:
    backoff = Backoff()
    slept = []
    while not backoff.rests:
        slept.append(backoff.seconds)
        assert not backoff.over(idle=True, visited=True)
    assert slept == [0.0003, 0.0006, 0.0012, 0.0024, 0.0048, 0.005]
    assert not backoff.over(idle=False, visited=True)
    assert (backoff.seconds, backoff.rests) == (0.005, False)
    assert backoff.over(idle=False, visited=False)
    assert backoff.seconds == 0.0003


def test_a_caller_who_comes_for_something_else_does_not_put_off_a_call_for_ever() -> None:
    backoff = Backoff()
    assert [backoff.over(idle=False, visited=True) for _ in range(10)] == [False] * 8 + [True, False]
    assert not backoff.over(idle=True, visited=False)
    assert [backoff.over(idle=False, visited=True) for _ in range(9)] == [False] * 8 + [True]


def test_a_listener_ends_the_sleep_at_once_and_once() -> None:
    backoff = Backoff()
    backoff.seconds = 30.0
    threading.Timer(0.01, backoff.hurry).start()
    assert backoff.sleep() == (True, False)
    backoff.seconds, backoff.visits = 0.0003, 7
    assert backoff.sleep() == (False, False)


def listen_for_late_calls(rank: int, world_size: int) -> float:
    """After many calls that the caller has carried, the shortest that one takes whose end is only listened for, s."""
    taken = []
    for _ in range(9):
        for _ in range(20):
            dist.all_reduce(torch.ones(4), async_op=True).wait()
            time.sleep(0.0005)
        if rank:
            time.sleep(0.003)
        began = time.perf_counter()
        done = threading.Event()
        dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda _, done=done: done.set())
        assert done.wait(10)
        taken.append(time.perf_counter() - began - 0.003 * (rank == 0))
    return min(taken)


def test_a_call_that_is_only_listened_for_waits_for_no_grace() -> None:
    assert max(ranks(2).run(listen_for_late_calls)) < 0.004
