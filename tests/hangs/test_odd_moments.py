"""Faults at awkward moments: beside other waits, between two steps of a call, from two threads at once."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, hurry, tell
from ranks import ranks

LARGE = 3_000_000  # does not fit into a ring: its sender waits for the receiver


def receives_beside_a_barrier(rank: int, world_size: int) -> list[Any]:
    """The receiver waits in a barrier while its receive is served in the background: no cycle, though it looks so."""
    told: list[Any] = []
    for k in range(3):
        x = torch.full((LARGE,), float(k)) if rank == 1 else torch.zeros(LARGE)
        if rank == 0:
            work = dist.irecv(x, 1)
            told.append(attempt(dist.barrier).text)
            assert work is not None
            work.wait()
        else:
            time.sleep(0.2)
            told.append(attempt(lambda x=x: dist.send(x, 0)).text)
            dist.barrier()
        told.append(bool((x == k).all()))
    return told


def test_a_receive_in_the_background_of_a_barrier_is_no_deadlock() -> None:
    assert ranks(2).run(receives_beside_a_barrier) == [["None", True] * 3] * 2


def half_sent(rank: int, world_size: int) -> list[Fault]:
    hurry(0.4)
    if rank == 1:
        time.sleep(0.8)
        return [attempt(lambda: dist.recv(torch.zeros(LARGE), 0))]
    late = attempt(lambda: dist.send(torch.zeros(LARGE), 1))
    faults = [late, attempt(lambda: dist.send(torch.zeros(1), 1)), attempt(lambda: dist.recv(torch.zeros(1), 1))]
    time.sleep(0.8)
    return faults


def test_a_send_that_times_out_half_way_ends_the_messages_of_both() -> None:
    with Job(half_sent, 2) as job:
        (late, again, receive), (receiver,) = job.results(15)
        pid = job.pid(0)
    late.says(
        "CollectiveTimeout", r"send\(float32 \[3000000\]\) to rank 1", r"timeout of 0\.4 s", "[1-9]\\d* of 12000000"
    )
    for fault in (again, receive):
        fault.says("CollectiveTimeout", "failed before and can only be destroyed", "send")
        assert fault.seconds < 0.2
    receiver.says("PeerLostError", rf"rank 0 \(pid {pid} on .*\) has given this group up", "send", "timeout")


def stopped(rank: int, world_size: int) -> list[Fault]:
    """Rank 2 is stopped when its call has met the others', which differs, and before it could tell of it."""
    dist.barrier()
    if rank == 2:
        work = dist.broadcast(torch.zeros(3), 0, async_op=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return [attempt(work.wait), attempt(dist.barrier)]
    time.sleep(0.2)
    faults = [attempt(lambda: dist.all_reduce(torch.zeros(3))), attempt(dist.barrier)]
    tell("heard")
    time.sleep(0.7)  # there when rank 2 goes on
    return faults


def test_a_mismatch_with_a_rank_that_is_stopped_is_told_in_time_and_ends_the_group_on_all() -> None:
    with Job(stopped, 3) as job:
        job.hear("heard", [0, 1])
        job.signal(2, signal.SIGCONT)
        *others, last = job.results(15)
    for fault, after in others:
        fault.says(
            "MismatchError", r"-> rank 2: broadcast\(float32 \[3\], root 0\)", "rank 0: all_reduce", "test_odd_mom"
        )
        fault.says("MismatchError", "Rank 2 did not come to tell of it: the group can only be destroyed")
        assert fault.seconds < 1.0
        after.says("MismatchError", "failed before and can only be destroyed")
    fault, after = last
    fault.says("MismatchError", "-> rank 2: broadcast", "rank 0: all_reduce", "can only be destroyed")
    after.says("MismatchError", "failed before and can only be destroyed")


def last_message(rank: int, world_size: int, how: str) -> list[Any]:
    """A message is sent and its sender is gone before anybody asks for it."""
    dist.barrier()
    if rank == 1:
        dist.send(torch.full((5,), 7.0), 0, tag=3)
        if how == "exit":
            os._exit(0)
        dist.destroy_process_group()
        return []
    time.sleep(0.3)
    x = torch.zeros(5)
    first = attempt(lambda: dist.recv(x, 1, tag=3))
    return [first.text, x.tolist(), attempt(lambda: dist.recv(x, 1, tag=3))]


def test_a_last_message_is_received_after_its_sender_has_gone() -> None:
    for how, words in (("exit", "is dead"), ("destroy", "has left the group")):
        with Job(last_message, 2, how) as job:
            text, values, second = job.results(10)[0]
        assert (text, values) == ("1", [7.0] * 5)
        second.says("PeerLostError", "rank 1 ", words)


def two_threads(rank: int, world_size: int) -> list[str]:
    """A group that has failed refuses every kind of call, at once and from whatever thread; another one works."""
    hurry(0.3)
    if rank == 1:
        time.sleep(0.5)
        return []
    attempt(dist.barrier)
    x, said = torch.zeros(4), []

    def hammer() -> None:
        for _ in range(100):
            said.append(attempt(dist.barrier))
            said.append(attempt(lambda: dist.all_reduce(x, async_op=True)))
            said.append(attempt(lambda: dist.all_gather([x], x)))

    threads = [threading.Thread(target=hammer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    alone = dist.new_group([0])
    dist.all_reduce(x, group=alone)
    return [f"{f.kind}: {f.text}" for f in said if f.seconds < 0.5]


def test_a_failed_group_refuses_calls_of_two_threads() -> None:
    with Job(two_threads, 2) as job:
        said = job.results(15)[0]
    assert len(said) == 600
    assert all(
        "CollectiveTimeout: this group has failed before and can only be destroyed: barrier()" in s for s in said
    )


class Watchdog(Exception):
    """What a signal handler of the user's raises."""


def interrupted(rank: int, world_size: int, kind: str, how: type[BaseException]) -> tuple[str, Fault]:
    """``how`` is raised by a signal handler while rank 0 waits; what it can do then."""

    def handler(*_: object) -> None:
        raise how("too late") if how is Watchdog else how

    signal.signal(signal.SIGINT, handler)
    dist.barrier()
    tell("ready")
    x = torch.zeros(2)
    if rank == 1:
        time.sleep(0.6)
        if kind == "recv":
            dist.send(torch.ones(2), 0)
        elif kind == "wait":
            dist.all_reduce(torch.ones(2))
        return "", attempt(dist.barrier)
    work = dist.all_reduce(x, async_op=True) if kind == "wait" else None
    start, ended = time.monotonic(), ""
    try:
        work.wait() if work else dist.recv(x, 1) if kind == "recv" else dist.all_reduce(x)
    except how:
        ended = "in time" if time.monotonic() - start < 0.5 else "late"
    if kind == "recv":
        dist.recv(x, 1)  # it is this one that gets the message
    elif work:
        work.wait()  # it has gone on
    assert x.tolist() == [1.0 * (kind != "all_reduce")] * 2
    return ended, attempt(dist.barrier)


def interrupted_before_its_peer(rank: int, world_size: int) -> Fault:
    """Rank 0 is interrupted in a small call, whose data lies ready; then rank 1 makes it."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        signal.signal(signal.SIGALRM, _raise_watchdog)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        store.wait(["interrupted"])
    fault = attempt(lambda: dist.all_reduce(torch.ones(1)))
    store.set("interrupted", "")
    return fault


def _raise_watchdog(*_: object) -> None:
    raise Watchdog("too late")


def test_a_call_that_an_interrupt_has_ended_succeeds_on_no_rank() -> None:
    with Job(interrupted_before_its_peer, 2) as job:
        first, second = job.results(20)
    first.says("Watchdog", "too late")
    second.says("PeerLostError", r"all_reduce\(.*no result to be trusted: rank 0 .*Watchdog interrupted a call")


@pytest.mark.parametrize("how", [KeyboardInterrupt, Watchdog])
def test_an_exception_of_a_signal_handler_ends_a_wait_and_leaves_nothing_half_done(how: type[BaseException]) -> None:
    for kind in ("all_reduce", "recv", "wait"):
        with Job(interrupted, 2, kind, how) as job:
            job.hear("ready")
            time.sleep(0.2)
            job.signal(0, signal.SIGINT)
            (ended, first), (_, second) = job.results(10)
        assert ended == "in time"
        if kind == "all_reduce":
            name = how.__name__
            first.says("UnisonoError", f"failed before and can only be destroyed: {name} interrupted a call")
            second.says("PeerLostError", rf"^barrier\(\), .*: rank 0 .*{name} interrupted a call under way")
        else:
            assert first.kind == second.kind == "", (first, second)
