"""A signal handler that calls unisono in the midst of a call: refused, or the group is left; nobody hangs."""

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hangs.job import Fault, Job, attempt, line_of

_KINDS = ("all_reduce", "recv", "wait")


class Watchdog(Exception):
    """A signal handler's own exception."""


def _call(kind: str, rank: int) -> Any:
    """Each rank's part in a call that rank 0 makes in one of three ways."""
    if kind == "recv":
        return dist.recv(torch.zeros(2), 1) if rank == 0 else dist.send(torch.zeros(2), 0)
    if kind == "all_reduce" or rank == 1:
        return dist.all_reduce(torch.zeros(2))
    work = dist.all_reduce(torch.zeros(2), async_op=True)
    assert work is not None
    return work.wait()


def _in_the_midst(kind: str, handler: Callable[[], object]) -> None:
    """Has ``handler`` called once, by a signal, while this thread is in the queue that serves ``kind``."""
    group: Any = dist.group.WORLD
    queue = group._group.messages if kind == "recv" else group._group.collectives

    store = _get_default_store()

    done: list[bool] = []

    def handle(*_: object) -> None:
        if queue.entered() and not done:
            done.append(True)  # another signal may be on its way
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                handler()
            finally:
                store.set("handled", "")

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0007)


def _refused(rank: int, world_size: int, kind: str) -> list[Fault]:
    dist.barrier()
    if rank == 1:
        _get_default_store().wait(["handled"])
        return [attempt(lambda: _call(kind, rank)), attempt(dist.barrier)]
    work: Any = dist.isend(torch.ones(1), 1, tag=9) if kind == "recv" else None
    tried = []

    def handler() -> None:
        tried.append(attempt(lambda: dist.isend(torch.ones(1), 1, tag=9) if kind == "recv" else dist.barrier()))
        if work is not None:
            tried.append(attempt(work.is_completed))

    _in_the_midst(kind, handler)
    ended = attempt(lambda: _call(kind, rank))
    return [*tried, ended, attempt(dist.barrier)]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_call_in_the_midst_of_another_is_refused_and_the_other_goes_on(kind: str) -> None:
    with Job(_refused, 2, kind) as job:
        (first, *rest), there = job.results(10)
    here, call = line_of(_refused, "tried.append(attempt(lambda"), r"(send\(float32 \[1\]\)|barrier\(\))"
    first.says(
        "UsageError", rf"{call} at \S*{here}in .* interrupts a call of the default group at \S*\d+ in _call", "flag"
    )
    assert [fault.kind for fault in [*rest, *there]] == [""] * len([*rest, *there])


def _destroyed(rank: int, world_size: int, kind: str, exits: bool) -> Fault:
    dist.barrier()
    store = _get_default_store()
    if rank == 1:
        store.wait(["ended"])  # not before: a call to which all have come is a success
        return attempt(lambda: [_call(kind, rank), dist.barrier()])

    def handler() -> None:
        dist.destroy_process_group()
        if exits:
            sys.exit(0)

    _in_the_midst(kind, handler)
    try:
        return attempt(lambda: _call(kind, rank))
    except SystemExit:
        return Fault("SystemExit", str(dist.is_initialized()), 0.0, 0.0)
    finally:
        store.set("ended", "")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("exits", [True, False])
def test_a_handler_may_leave_the_group_and_end_the_program(kind: str, exits: bool) -> None:
    with Job(_destroyed, 2, kind, exits) as job:
        first, second = job.results(10)
    left = r"this rank has left the group \(destroy_process_group\) while the call was under way"
    first.says(*(("SystemExit", "False") if exits else ("UnisonoError", left)))
    assert first.seconds < 1
    second.says("PeerLostError", r"rank 0 .* has left the group \(destroy_process_group\)$")


def _raised_before_the_wait(rank: int, world_size: int, kind: str) -> list[Fault]:
    """A signal handler of rank 0 raises as a call that is under way begins to wait."""
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        return [attempt(lambda: [_call(kind, rank), kind == "recv" or dist.barrier()])]
    group: Any = dist.group.WORLD
    queue = group._group.messages if kind == "recv" else group._group.collectives
    owner, waits = (queue._worker, "wake") if kind == "wait" else (queue, "finish")

    def raises(*_: object, **__: object) -> None:
        delattr(owner, waits)
        raise Watchdog("too late")

    setattr(owner, waits, raises)
    first = attempt(lambda: _call(kind, rank))
    return [first, attempt(lambda: _call(kind, rank))]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_call_whose_wait_is_never_begun_is_abandoned(kind: str) -> None:
    with Job(_raised_before_the_wait, 2, kind) as job:
        (first, again), (second,) = job.results(10)
    first.says("Watchdog", "^too late$")
    if kind == "recv":  # it is this one that gets the message
        assert again.kind == second.kind == ""
        return
    again.says("UnisonoError", "failed before and can only be destroyed: Watchdog interrupted a call.*too late")
    second.says("PeerLostError", "Watchdog")


def _left_at_the_end(rank: int, world_size: int) -> list[Fault]:
    """Rank 0 leaves the group as a call returns from its queue."""
    dist.barrier()
    if rank == 1:
        return []
    group: Any = dist.group.WORLD
    queue = group._group.messages
    run_now = queue.run_now

    def moved(*args: Any) -> Any:
        message = run_now(*args)
        dist.destroy_process_group()
        return message

    queue.run_now = moved
    return [attempt(lambda: dist.send(torch.zeros(2), 1))]


def test_a_message_that_is_through_is_so_although_the_group_is_left_then() -> None:
    with Job(_left_at_the_end, 2) as job:
        ((fault,), _) = job.results(10)
    assert not fault.kind, fault


def _joins(rank: int, world_size: int) -> Fault:
    group: Any = dist.new_group([0])
    with group._group._joining:
        return attempt(lambda: dist.barrier(group))


def test_a_call_in_the_midst_of_a_groups_first_one_is_refused() -> None:
    with Job(_joins, 1) as job:
        (first,) = job.results(10)
    first.says("UsageError", "a signal handler or a finalizer can not communicate then")


def _raised(rank: int, world_size: int, kind: str) -> list[Fault]:
    dist.barrier()
    if rank == 1:
        _get_default_store().wait(["handled"])
        return [attempt(lambda: [_call(kind, rank), dist.barrier()])]

    def handler() -> None:
        raise Watchdog("too late")

    _in_the_midst(kind, handler)
    return [attempt(lambda: _call(kind, rank)), attempt(lambda: _call(kind, rank))]


_BETWEEN = {"recv": "", "wait": "MismatchError"}
"""How the second call ends if the first was broken off between two of its steps: a message that has moved nothing is
withdrawn, an asynchronous call goes on and meets its peer's part in the first, so that the second meets the barrier."""


@pytest.mark.parametrize("kind", _KINDS)
def test_an_exception_raised_in_the_midst_of_a_call_ends_the_group(kind: str) -> None:
    with Job(_raised, 2, kind) as job:
        (first, again), (second,) = job.results(10)
    first.says("Watchdog", "^too late$")
    if again.kind != _BETWEEN.get(kind):
        again.says("UnisonoError", "failed before and can only be destroyed: .*Watchdog.*too late")
    assert second.kind in ("PeerLostError", "MismatchError")


def _raised_as_the_queue_is_taken(rank: int, world_size: int, way: str) -> list[Any]:
    x = torch.zeros(2)
    if rank == 1:
        _get_default_store().wait(["raised"])
        dist.send(torch.ones(2), 0)
        return []
    work: Any = dist.irecv(x, 1)

    def raise_once(frame: object, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ == "acquire":
            sys.setprofile(None)
            raise Watchdog("too late")

    sys.setprofile(raise_once)  # as a signal handler that Python runs at that moment
    fault = attempt(getattr(work, way))
    _get_default_store().set("raised", "")
    ended = attempt(work.wait if way == "is_completed" else lambda: dist.recv(x, 1))
    return [fault, ended, x.tolist()]


@pytest.mark.parametrize("way", ["is_completed", "wait"])
def test_an_exception_raised_as_a_queue_is_taken_leaves_it_free(way: str) -> None:
    with Job(_raised_as_the_queue_is_taken, 2, way) as job:
        (first, again, values), _ = job.results(10)
    first.says("Watchdog", "^too late$")
    assert (again.kind, values) == ("", [1.0, 1.0])
