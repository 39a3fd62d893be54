"""Pages: a process tells what it waits for, answers where it is, and is found by its peers; forks have none."""

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from unisono.transport.process import Identity
from unisono.watch.status_page import PAGE_NAME, OwnPage, find_page, own_page


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[OwnPage, int], None]], int]]:
    """Forks processes that have a page of their own, run a function with it and a pipe, and are killed at the end."""
    pids = []

    def fork(body: Callable[[OwnPage, int], None]) -> int:
        hear, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                mine = own_page()
                os.write(say, b"x")
                body(mine, say)
            finally:
                os._exit(0)
        pids.append(pid)
        os.close(say)
        assert os.read(hear, 1) == b"x"
        os.close(hear)
        return pid

    yield fork
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def identity(pid: int) -> Identity:
    from unisono.transport.process import start_time

    return Identity(pid, start_time(pid))


def sleeps_in_user_code(_: OwnPage, __: int) -> None:
    time.sleep(60)


def sleeps_in_the_library(_: OwnPage, __: int) -> None:
    queue.Queue[int]().get()


@pytest.mark.parametrize(
    ("body", "line"),
    [(sleeps_in_user_code, "time.sleep(60)"), (sleeps_in_the_library, "queue.Queue[int]().get()")],
)
def test_a_process_answers_where_it_is(
    body: Callable[[OwnPage, int], None], line: str, child: Callable[[Callable[[OwnPage, int], None]], int]
) -> None:
    who, deadline = identity(child(body)), time.monotonic() + 5
    where, first = f"in {body.__name__}: {line}", ""
    while where not in first and time.monotonic() < deadline:  # a child may still be on its way into the body
        first = own_page().stacks_of([who], 5.0)[0].partition("\n")[0]
    assert "test_status_page.py:" in first
    assert where in first


def test_a_stopped_or_dead_process_does_not_answer(child: Callable[[Callable[[OwnPage, int], None]], int]) -> None:
    pid = child(sleeps_in_user_code)
    who = identity(pid)
    assert own_page().stacks_of([who], 5.0) != [""]
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # a thread on another core may answer until the signal has stopped it as well
    start = time.monotonic()
    assert own_page().stacks_of([who], 0.2) == [""]
    assert time.monotonic() - start < 0.6
    assert own_page().stacks_of([Identity(pid, who.started + 1), Identity(2**22 + 1, 1)], 0.2) == ["", ""]


def makes_another(_: OwnPage, __: int) -> None:
    """Has just made its page, which has no size yet."""
    os.closerange(3, 1000)
    os.memfd_create(PAGE_NAME, os.MFD_CLOEXEC)
    time.sleep(60)


def test_a_page_in_the_making_is_not_found(child: Callable[[Callable[[OwnPage, int], None]], int]) -> None:
    who, deadline = identity(child(makes_another)), time.monotonic() + 5
    while find_page(who) is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert find_page(who) is None


def closes_all(_: OwnPage, __: int) -> None:
    os.closerange(3, 1000)
    time.sleep(60)


def executes(_: OwnPage, __: int) -> None:
    os.execv("/bin/sleep", ["sleep", "60"])


@pytest.mark.parametrize(("body", "gone"), [(sleeps_in_user_code, False), (closes_all, False), (executes, True)])
def test_who_runs_another_program_is_told_from_who_closed_its_files(
    body: Callable[[OwnPage, int], None], gone: bool, child: Callable[[Callable[[OwnPage, int], None]], int]
) -> None:
    who, deadline = identity(child(body)), time.monotonic() + 0.3
    while not (replaced := own_page().replaced(who)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert replaced == gone


def waits(page: OwnPage, _: int) -> None:
    page.begin("all_reduce, which waits")
    page.publish_edges([Identity(11, 12), Identity(13, 14)])
    page.publish_edges([Identity(13, 14)])
    time.sleep(60)


def test_a_wait_is_read_by_others(child: Callable[[Callable[[OwnPage, int], None]], int]) -> None:
    who = identity(child(waits))
    page, deadline = find_page(who), time.monotonic() + 5
    assert page is not None
    while page.wait() != (1, 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert page.wait() == (1, 2)
    assert page.edges() == [Identity(13, 14)]
    assert page.text() == "all_reduce, which waits"
    page.set_verdict(1, "for ever: é")
    assert page.verdict() == (1, "for ever: é")


def test_one_wait_at_a_time_is_published() -> None:
    mine = own_page()
    number = mine.begin("first")
    assert number
    assert mine.begin("of another thread") == 0
    assert mine.text() == "first"
    mine.end()
    assert mine.wait()[0] == 0
    assert mine.begin("second") == number + 1
    mine.end()


def test_long_texts_are_cut_not_spilled() -> None:
    mine = own_page()
    mine.begin("é" * 5000)
    mine.set_verdict(1, "x" * 100_000)
    assert set(mine.text().rstrip("�")) == {"é"}
    assert set(mine.verdict()[1]) == {"x"}
    assert mine.identity() == Identity.mine()
    mine.end()


def test_a_forked_child_has_a_page_of_its_own(child: Callable[[Callable[[OwnPage, int], None]], int]) -> None:
    mine = own_page()
    who = identity(child(sleeps_in_user_code))
    page = find_page(who)
    assert page is not None
    assert page.identity() == who != mine.identity()


def test_no_page_of_a_process_without_one() -> None:
    parent = identity(os.getppid())
    assert find_page(parent) is None
