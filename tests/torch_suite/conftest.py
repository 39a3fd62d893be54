"""Starts PyTorch's suite as soon as it is known to be wanted: it mostly waits, so the other tests can run meanwhile."""

import os

import pytest

from ranks import FORKS
from torch_suite.suite import Suite

_running: dict[int, Suite] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.name.startswith("test_passes_what_gloo_passes") for item in session.items):
        # The server of all other tests loads first: behind the ranks of the suite, which are nice, it would wait half a
        # minute for their lock.
        first = FORKS.Process(target=os.getpid)
        first.start()
        first.join()
        for world_size in (3, 4):
            _running[world_size] = Suite(world_size)


def pytest_sessionfinish() -> None:
    while _running:
        _running.popitem()[1].kill()


@pytest.fixture
def suites() -> dict[int, Suite]:
    """Both sizes, under way since the collection of the tests."""
    return _running
