"""Processes of this host: who lives, also for a process that can open no file any more."""

import builtins
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from unisono.transport.process import Identity, alive, start_time, stopped


@contextmanager
def no_files() -> Iterator[None]:
    """This process can open none."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


PARENT = Identity(os.getppid(), start_time(os.getppid()))
MINE = Identity.mine()


def test_nobody_is_taken_for_dead_because_no_file_can_be_opened() -> None:
    with no_files():
        assert alive(PARENT)
        assert not alive(Identity(2**22 + 1, 0))
        assert Identity.mine() == MINE
        with pytest.raises(OSError, match="Too many open files"):
            start_time(PARENT.pid)


@pytest.mark.parametrize("question", [alive, stopped])
def test_an_exception_of_a_signal_handler_is_no_answer(
    question: Callable[[Identity], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise TimeoutError("a watchdog's")

    monkeypatch.setattr(builtins, "open", interrupted)
    with pytest.raises(TimeoutError, match="a watchdog's"):
        question(PARENT)


def test_a_fork_is_another_process() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(Identity.mine() != Identity(os.getpid(), start_time(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
