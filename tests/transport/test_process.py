"""Processes of this host: who lives, also for a process that can open no file any more; who waits for a core."""

import builtins
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from unisono.transport.process import Identity, alive, run_delay, start_time, stopped


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


@pytest.mark.parametrize("question", [alive, run_delay, stopped])
def test_an_exception_of_a_signal_handler_is_no_answer(
    question: Callable[[Identity], object], monkeypatch: pytest.MonkeyPatch
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


def test_the_run_delay_grows_while_a_process_waits_for_a_core() -> None:
    """Two that share one core: each waits while the other runs."""
    mine = Identity.mine()
    before = run_delay(mine)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"]) as other:
            deadline = time.monotonic() + 20
            while run_delay(mine) < before + 0.02 and time.monotonic() < deadline:
                pass
            other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert run_delay(mine) >= before + 0.02
    assert run_delay(Identity(1 << 30, 1)) == 0.0
