"""Starts PyTorch's suite as soon as it is known to be wanted: it mostly waits, so the other tests can run meanwhile."""

import os

import pytest

from ranks import FORKS
from torch_suite.suite import RUNS, Suite

_running: dict[str, Suite] = {}


def pytest_collection_finish(session: pytest.Session) -> None:
    names = {item.name for item in session.items}
    wanted = [run for run in RUNS if f"test_passes_what_gloo_passes[{run}]" in names]
    if wanted:
        # The server of all other tests loads first: behind the ranks of the suite, which are nice, it would wait half a
        # minute for their lock.
        first = FORKS.Process(target=os.getpid)
        first.start()
        first.join()
        for run in wanted:
            _running[run] = Suite(*RUNS[run])


def pytest_sessionfinish() -> None:
    while _running:
        _running.popitem()[1].kill()


@pytest.fixture
def suites() -> dict[str, Suite]:
    """All runs, under way since the collection of the tests."""
    return _running
