"""Threads beside the one that waits: which of them count as able to issue calls."""

import logging.handlers
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest

from ranks import ranks
from unisono.transport.process import OwnThread
from unisono.watch.deadlock import others_could_call


@contextmanager
def feeder_of_a_queue() -> Iterator[None]:
    pipe: multiprocessing.Queue[int] = multiprocessing.Queue()
    pipe.put(1)
    yield
    pipe.close()
    pipe.join_thread()


@contextmanager
def idle_executor() -> Iterator[None]:
    with ThreadPoolExecutor(2) as executor:
        executor.submit(int).result()
        yield


@contextmanager
def log_listener() -> Iterator[None]:
    listener = logging.handlers.QueueListener(queue.SimpleQueue())
    listener.start()
    yield
    listener.stop()


def user_code(end: threading.Event) -> None:
    end.wait()


@contextmanager
def waiting(
    target: Callable[[threading.Event], object],
    kind: type[threading.Thread] = threading.Thread,
    name: str | None = None,
) -> Iterator[None]:
    end = threading.Event()
    thread = kind(target=target, args=(end,), name=name)
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def busy_executor() -> Iterator[None]:
    end = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(end.wait)
        yield
        end.set()


@contextmanager
def timer() -> Iterator[None]:
    thread = threading.Timer(60.0, print)
    thread.start()
    yield
    thread.cancel()
    thread.join()


HARMLESS = {
    "nobody": nullcontext,
    "feeder of a queue": feeder_of_a_queue,
    "idle executor": idle_executor,
    "listener of a log": log_listener,
    "thread of the library": lambda: waiting(user_code, OwnThread),
}
ABLE = {
    "thread": lambda: waiting(user_code),
    "thread named like the library's": lambda: waiting(user_code, name="unisono sender"),
    "thread in standard code": lambda: waiting(threading.Event.wait),
    "busy executor": busy_executor,
    "timer": timer,
}


def beside(rank: int, world_size: int, name: str) -> list[bool]:
    """What is said while the threads are there, once they have had the time to reach their place, and afterwards."""
    able = name in ABLE
    with {**HARMLESS, **ABLE}[name]():
        deadline = time.monotonic() + 2.0
        while others_could_call() != able and time.monotonic() < deadline:
            time.sleep(0.001)
        there = others_could_call()
    return [there, others_could_call()]


@pytest.mark.parametrize("name", HARMLESS)
def test_threads_that_could_not_call(name: str) -> None:
    assert ranks(1).run(beside, name) == [[False, False]]


@pytest.mark.parametrize("name", ABLE)
def test_threads_that_could(name: str) -> None:
    assert ranks(1).run(beside, name) == [[True, False]]


def from_elsewhere(rank: int, world_size: int) -> bool:
    """Asked by another thread than the main one, which could call."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(others_could_call).result()


def test_the_main_thread_could_call() -> None:
    assert ranks(1).run(from_elsewhere) == [True]
