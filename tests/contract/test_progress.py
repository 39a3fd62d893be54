"""Asynchronous calls that a thread carries while the caller computes: values, order, errors and ends as without it."""

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, init, line_of, tell
from ranks import HOSTS, ranks
from unisono.runtime import worker
from unisono.torch_names import all_gather_single, reduce_scatter_single

LARGE = 200_000  # elements: more than is tried at once


def queue() -> Any:
    group: Any = dist.group.WORLD
    return group._group.collectives


def begin(rank: int, world_size: int, path: str, wish: str = "1", timeout: float = 30.0) -> None:
    """A default group with, or without, progress beside computation."""
    os.environ["UNISONO_ASYNC_PROGRESS"] = wish
    try:
        init(path, rank, world_size, timeout)
        assert queue().async_progress == (wish == "1")
    finally:
        del os.environ["UNISONO_ASYNC_PROGRESS"]


def in_flight(rank: int, world_size: int, path: str, wish: str) -> list[str]:
    """Many at once, large and small, of several kinds, waited for in an order of this rank's own, others in between."""
    begin(rank, world_size, path, wish)
    n, problems = world_size, []
    works: list[Any] = []
    checks: list[tuple[torch.Tensor, float]] = []
    for k in range(24):
        x, total = torch.full((LARGE if k % 3 else 5,), float(rank + k)), float(sum(r + k for r in range(n)))
        y = torch.empty(len(x) * n if k % 4 == 2 else len(x) // n)
        match k % 4:
            case 0:
                works.append(dist.all_reduce(x, async_op=True))
                checks.append((x, total))
            case 1:
                works.append(dist.broadcast(x, k % n, async_op=True))
                checks.append((x, float(k % n + k)))
            case 2:
                works.append(all_gather_single(y, x, async_op=True))
                checks.append((y[-1:], float(n - 1 + k)))
            case 3:
                works.append(reduce_scatter_single(y, x[: len(y) * n], async_op=True))
                checks.append((y, total))
        if k % 7 == 6:
            z = torch.full((LARGE if k % 2 else 3,), 1.0)
            dist.all_reduce(z)
            problems += [] if z.eq(n).all() else [f"a synchronous call after {k}"]
    for k in sorted(range(24), key=lambda k: (k * (7 if rank else 11)) % 24):
        works[k].wait()
        found, value = checks[k]
        problems += [] if found.eq(value).all() and works[k].is_completed() else [f"call {k} once waited for"]
    dist.destroy_process_group()
    return problems


@pytest.mark.parametrize("world_size", [2, 3], indirect=True)
@pytest.mark.parametrize("wish", ["1", "0"])
def test_many_in_flight(world_size: int, wish: str, tmp_path: Path) -> None:
    assert ranks(world_size, group=False).run(in_flight, str(tmp_path / "meeting"), wish) == [[]] * world_size


def some_ahead(rank: int, world_size: int, path: str) -> float:
    """Rank 0 has the thread, the others do without."""
    begin(rank, world_size, path, "0" if rank else "1")
    x = torch.ones(LARGE)
    works = [dist.all_reduce(x, async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    dist.destroy_process_group()
    return x.max().item()


def test_ranks_may_differ(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(some_ahead, str(tmp_path / "meeting")) == [16.0, 16.0]


def nobody_waits(rank: int, world_size: int, path: str) -> tuple[bool, list[bool], list[bool]]:
    """Issued at once though a peer is late, done without a wait though this thread never comes back to unisono."""
    begin(rank, world_size, path)
    tensors = [torch.ones(LARGE) for _ in range(6)]
    if rank == world_size - 1:
        time.sleep(0.2)
    start = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    issued, early = time.monotonic() - start < 0.15, [work.is_completed() for work in works]
    deadline = time.monotonic() + 10
    while not tensors[-1].eq(world_size).all() and time.monotonic() < deadline:
        time.sleep(0.002)
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.002)
    done = [bool(x.eq(world_size).all()) and work.is_success() for x, work in zip(tensors, works, strict=True)]
    dist.barrier()
    dist.destroy_process_group()
    return issued, early, done


def test_calls_end_although_nobody_waits(tmp_path: Path) -> None:
    (issued, early, done), (_, _, also) = ranks(2, group=False).run(nobody_waits, str(tmp_path / "meeting"))
    assert issued
    assert early == [False] * 6
    assert done == also == [True] * 6


def listened(rank: int, world_size: int, path: str) -> tuple[list[int], list[float], list[str]]:
    """Listeners hear in the order of the calls, and may make calls of their own, whose listeners hear too."""
    begin(rank, world_size, path)
    heard: list[int] = []
    tensors = [torch.ones(LARGE) for _ in range(5)]
    y, z, threads = torch.ones(LARGE), torch.full((2,), 1.0), []

    def note(k: int) -> Callable[[Any], torch.Tensor]:
        def listener(future: Any) -> torch.Tensor:
            threads.append(threading.current_thread().name)
            heard.append(k)
            return future.value()[0]

        return listener

    def call_again(future: Any) -> float:
        dist.all_reduce(y)
        dist.all_reduce(z, async_op=True).wait()
        return future.value()[0].item()

    if rank:
        time.sleep(0.1)
    futures = [dist.all_reduce(x, async_op=True).get_future().then(note(k)) for k, x in enumerate(tensors)]
    chained = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(call_again)
    values = [futures[k].wait()[0].item() for k in (4, 0, 2, 1, 3)]
    values += [chained.wait(), y[0].item(), z[1].item()]
    dist.barrier()
    dist.destroy_process_group()
    return heard, values, threads


def test_listeners(tmp_path: Path) -> None:
    found = ranks(2, group=False).run(listened, str(tmp_path / "meeting"))
    for heard, values, _ in found:
        assert heard == list(range(5))
        assert values == [2.0] * 8
    assert "MainThread" not in found[0][2]  # the peer came late: nobody but the worker was there


def wrong_in_between(rank: int, world_size: int, path: str) -> tuple[list[float], list[str], Fault, int]:
    """One of many disagrees: it alone fails, at its own wait and in its future, and names where it was made."""
    begin(rank, world_size, path)
    tensors, wrong = [torch.ones(LARGE) for _ in range(6)], torch.ones(LARGE + rank)
    if rank:
        time.sleep(0.1)
    works = [dist.all_reduce(x, async_op=True) for x in tensors[:3]]
    bad = dist.all_reduce(wrong, async_op=True)
    future = bad.get_future()
    works += [dist.all_reduce(x, async_op=True) for x in tensors[3:]]
    for work in works:
        work.wait()
    fault = attempt(bad.wait)
    words = [attempt(future.wait).text, type(bad.exception()).__name__]
    calls = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    dist.destroy_process_group()
    return [x[-1].item() for x in tensors], words, fault, calls


def test_a_mismatch_in_the_midst_of_the_queue(tmp_path: Path) -> None:
    here = line_of(wrong_in_between, "bad = dist.all_reduce").rstrip("\\ ")
    for found, (future, kind), fault, calls in ranks(2, group=False).run(wrong_in_between, str(tmp_path / "meeting")):
        assert found == [2.0] * 6
        fault.says("MismatchError", rf"rank 0: all_reduce\(float32 \[{LARGE}\], SUM\) .*{here}", "call no. 4")
        assert "MismatchError" in future
        assert (kind, calls) == ("MismatchError", 7)


def outlives(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Rank 1 dies while calls are in flight: each ends with the error, polled, listened to or waited for."""
    begin(rank, world_size, path)
    dist.barrier()
    tell("ready")
    if rank == 1:
        time.sleep(60)
    works = [dist.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(4)]
    future, seen = works[2].get_future(), []
    chained = future.then(lambda f: seen.append(attempt(f.value).text))
    deadline = time.monotonic() + 10
    while not works[3].is_completed() and time.monotonic() < deadline:
        time.sleep(0.002)
    found = {
        "polled": (time.monotonic(), works[3].is_success(), type(works[3].exception()).__name__),
        "waits": [attempt(work.wait) for work in works],
        "future": attempt(future.wait),
        "chained": attempt(chained.wait),
        "next": attempt(lambda: dist.all_reduce(torch.ones(LARGE), async_op=True)),
        "destroy": attempt(dist.destroy_process_group),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("unisono") and "watch" not in t.name],
    }
    return {**found, "seen": seen}


def test_a_peer_killed_while_calls_are_in_flight(tmp_path: Path) -> None:
    with Job(outlives, 3, str(tmp_path / "meeting"), group=False) as job:
        job.hear("ready")
        time.sleep(0.1)
        pid, killed = job.pid(1), job.signal(1, signal.SIGKILL)
        first, _, third = job.results(15)
    named = rf"rank 1 \(pid {pid} on "
    for found in (first, third):
        at, success, kind = found["polled"]
        assert at - killed < 1.5
        assert (success, kind) == (False, "PeerLostError")
        for fault in found["waits"]:
            fault.says("PeerLostError", rf"all_reduce\(float32 \[{LARGE}\], SUM\)", named)
        found["future"].says("RuntimeError", named)
        found["next"].says("PeerLostError", "failed before and can only be destroyed", named)
        assert not found["chained"].kind
        assert len(found["seen"]) == 1
        assert found["destroy"].kind == ""
        assert found["threads"] == []


def waits_in_vain(rank: int, world_size: int, path: str) -> tuple[Fault, list[float], list[Fault]]:
    """Rank 1 is late: a wait of its own ends, and the calls go on. To another group it never comes."""
    begin(rank, world_size, path)
    dist.barrier()
    tensors, short = [torch.ones(LARGE) for _ in range(3)], Fault("", "", 0.0, 0.0)
    if rank:
        time.sleep(0.3)
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    if rank == 0:
        short = attempt(lambda: works[0].wait(datetime.timedelta(seconds=0.05)))
    for work in works:
        work.wait()
    os.environ["UNISONO_ASYNC_PROGRESS"] = "1"
    group, faults = dist.new_group(timeout=datetime.timedelta(seconds=0.3)), []
    if rank == 0:
        lost = [dist.all_reduce(torch.ones(LARGE), async_op=True, group=group) for _ in range(3)]
        deadline = time.monotonic() + 10
        while not lost[-1].is_completed() and time.monotonic() < deadline:
            time.sleep(0.002)
        faults = [Fault("", str(all(work.is_completed() for work in lost)), 0.0, 0.0)]
        faults += [attempt(work.wait) for work in lost]
    del os.environ["UNISONO_ASYNC_PROGRESS"]
    dist.barrier()
    dist.destroy_process_group()
    return short, [x[0].item() for x in tensors], faults


def test_timeouts(tmp_path: Path) -> None:
    (short, first, faults), (_, second, _) = ranks(2, group=False).run(waits_in_vain, str(tmp_path / "meeting"))
    short.says(
        "CollectiveTimeout", r"call no\. 2 .*did not end within the timeout of 0\.05 s of this wait", "rank 1 miss"
    )
    assert first == second == [2.0] * 3
    polled, *waits = faults
    assert polled.text == "True"
    for fault in waits:
        fault.says("CollectiveTimeout", r"did not end within its timeout of 0\.3 s: rank 1 missing")


def leaves(rank: int, world_size: int, path: str) -> tuple[list[Fault], float, list[str]]:
    """The group is left with calls in flight; rank 1 has issued none of them."""
    begin(rank, world_size, path)
    dist.barrier()
    if rank:
        time.sleep(0.3)
        return [attempt(lambda: dist.all_reduce(torch.ones(LARGE))), attempt(dist.destroy_process_group)], 0.0, []
    works = [dist.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(3)]
    future = works[1].get_future()
    time.sleep(0.05)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    faults = [*(attempt(work.wait) for work in works), attempt(future.wait)]
    return faults, took, [t.name for t in threading.enumerate() if t.name.startswith("unisono the default")]


def test_destroy_with_calls_in_flight(tmp_path: Path) -> None:
    (faults, took, threads), (late, _, _) = ranks(2, group=False).run(leaves, str(tmp_path / "meeting"))
    *waits, future = faults
    for fault in waits:
        fault.says("UnisonoError", r"has left the group \(destroy_process_group\) while the call was under way")
    future.says("RuntimeError", "has left the group")
    assert took < 1.0
    assert threads == []
    if HOSTS > 1:  # all that the late call needs of rank 0 has been sent: it ends
        assert not late[0].kind
    else:
        late[0].says("PeerLostError", r"rank 0 .*has left the group")
    assert not late[1].kind


def by_two_threads(rank: int, world_size: int, path: str) -> list[str]:
    """Both make the same calls in one group, and calls of their own in groups of their own."""
    begin(rank, world_size, path)
    os.environ["UNISONO_ASYNC_PROGRESS"] = "1"
    groups, problems = [dist.new_group(), dist.new_group()], []
    try:
        for group in groups:
            dist.barrier(group)
    finally:
        del os.environ["UNISONO_ASYNC_PROGRESS"]

    def issue(me: int) -> None:
        pending = []
        for k in range(12):
            x, y = torch.ones(LARGE), torch.full((LARGE if k % 2 else 9,), float(me + rank + k))
            pending.append((dist.all_reduce(x, async_op=True), x, 2.0))
            pending.append((dist.all_reduce(y, group=groups[me], async_op=True), y, 2.0 * (me + k) + 1))
            if k % 4 == 3:
                for work, tensor, value in reversed(pending):
                    work.wait()
                    problems.extend(
                        [] if tensor.eq(value).all() else [f"thread {me}, call {k}: {tensor[0]}, not {value}"]
                    )
                pending.clear()

    threads = [threading.Thread(target=issue, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.destroy_process_group()
    return problems


def test_two_threads_that_issue(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(by_two_threads, str(tmp_path / "meeting")) == [[], []]


def interrupted(rank: int, world_size: int, path: str) -> list[Fault]:
    """A signal handler calls in the midst of a wait, synchronously and not: refused, and the wait goes on."""
    begin(rank, world_size, path)
    dist.barrier()
    if rank:
        dist.distributed_c10d._get_default_store().wait(["handled"])
    x, faults = torch.ones(LARGE), []

    def handle(*_: object) -> None:
        if queue().entered():
            signal.setitimer(signal.ITIMER_REAL, 0)
            faults.append(attempt(dist.barrier))
            faults.append(attempt(lambda: dist.all_reduce(torch.ones(LARGE), async_op=True)))
            dist.distributed_c10d._get_default_store().set("handled", "")

    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0007)
    work.wait()
    return [*faults, attempt(x.max().item), attempt(dist.barrier)]


def test_a_signal_handler_is_refused(tmp_path: Path) -> None:
    with Job(interrupted, 2, str(tmp_path / "meeting"), group=False) as job:
        (small, large, value, after), (also, later) = job.results(15)
    small.says("UsageError", r"barrier\(\) at .* interrupts a call of the default group at .* in interrupted", "flag")
    large.says("UsageError", rf"all_reduce\(float32 \[{LARGE}\], SUM\) at .* interrupts a call of the default group")
    assert value.text == also.text == "2.0"
    assert not after.kind
    assert not later.kind


def misspelt(rank: int, world_size: int, path: str) -> Fault:
    os.environ["UNISONO_ASYNC_PROGRESS"] = "1" if rank else "yes"
    try:
        fault = attempt(lambda: [init(path, rank, world_size, 10.0), dist.barrier()])
    finally:
        del os.environ["UNISONO_ASYNC_PROGRESS"]
    if dist.is_initialized():
        dist.destroy_process_group()
    return fault


def test_another_word_is_refused_and_the_peers_hear_of_it(tmp_path: Path) -> None:
    first, second = ranks(2, group=False).run(misspelt, str(tmp_path / "meeting"))
    words = "UNISONO_ASYNC_PROGRESS is 'yes', expected 0, 1, or nothing: by the free cores"
    first.says("UsageError", f"^{words}$")
    second.says("PeerLostError", "rank 0 .*could not join", words)
    assert second.seconds < 5


def by_the_cores(rank: int, world_size: int, path: str) -> tuple[bool, int, float]:
    """Nothing is said: whether there is a core beyond those that the ranks compute on."""
    seen, worker._sharers = worker._sharers, {}
    try:
        init(path, rank, world_size)
        x = torch.ones(LARGE)
        dist.all_reduce(x, async_op=True).wait()
        return queue().async_progress, len(os.sched_getaffinity(0)), x.max().item()
    finally:
        dist.destroy_process_group()
        worker._sharers = seen


def test_where_cores_are_free(tmp_path: Path) -> None:
    for n in (1, 2):
        for ahead, cores, value in ranks(n, group=False).run(by_the_cores, str(tmp_path / f"meeting{n}")):
            assert ahead == (cores >= 2 * -(-n // HOSTS))
            assert value == n


def forked_in_between(rank: int, world_size: int, path: str, wish: str) -> tuple[str, list[float]]:
    """Rank 0 forks while its calls wait; the child waits for one of them, which is not its own."""
    begin(rank, world_size, path, wish)
    if rank == 1:
        time.sleep(0.5)
    inputs = [torch.full((LARGE,), float(rank + k)) for k in range(3)]
    works = [dist.all_reduce(x, async_op=True) for x in inputs]
    said = ""
    if rank == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            fault = attempt(works[-1].wait)
            os.write(writer, f"{fault.kind} {fault.text}".encode()[:500])
            os._exit(0)
        os.close(writer)
        said = os.read(reader, 500).decode()
        os.close(reader)
        os.waitpid(child, 0)
    for work in works:
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return said, [x[-1].item() for x in inputs]


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_forked_child_leaves_the_calls_of_its_parent_alone(wish: str, tmp_path: Path) -> None:
    (said, first), (_, second) = ranks(2, group=False).run(forked_in_between, str(tmp_path / "meeting"), wish)
    assert "belongs to the process that this one was forked from" in said
    assert first == second == [1.0, 3.0, 5.0]
