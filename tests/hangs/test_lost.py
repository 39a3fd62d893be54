"""A rank that is gone: who waits for it reads within a second who it was, how it ended and which call waited."""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, init, tell
from unisono.backend.group import Group

HOST = os.uname().nodename


def endless(rank: int, world_size: int, kind: str) -> Fault:
    """Rank 1 waits where it will be killed; the others are in, or come to, calls that need it."""
    dist.barrier()
    x, peer = torch.zeros(4), 1
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "recv": lambda: dist.recv(x, peer),
        "large send": lambda: dist.send(torch.zeros(5_000_000), peer),
        "recv from any": lambda: dist.recv(x),
        "loop": lambda: [dist.all_reduce(x) for _ in range(10**7)],
        "large loop": lambda: [dist.all_reduce(torch.zeros(1_000_000)) for _ in range(10**6)],
    }
    tell("ready")
    if rank == 1 and "loop" not in kind:
        time.sleep(60)
    return attempt(calls[kind])


def leaves_nothing(rank: int, world_size: int, kind: str) -> int:
    """The mappings of the group's memory after a loss and destroy_process_group, with nothing collected."""
    gc.disable()
    fault = endless(rank, world_size, kind)
    assert fault.kind == "PeerLostError", fault
    dist.destroy_process_group()
    with open("/proc/self/maps") as lines:
        return sum("unisono" in line for line in lines)


@pytest.mark.parametrize("kind", ["loop", "wait", "recv"])
def test_the_error_of_a_lost_rank_keeps_no_memory(kind: str) -> None:
    with Job(leaves_nothing, 3, kind) as job:
        job.hear("ready")
        job.signal(1, signal.SIGKILL)
        results = job.results(20)
    assert [results[0], results[2]] == [0, 0]


KINDS = ["all_reduce", "wait", "future", "recv", "large send", "recv from any", "loop", "large loop"]


@pytest.mark.parametrize("kind", KINDS)
def test_killed(kind: str) -> None:
    world_size = 2 if kind == "recv from any" else 3
    with Job(endless, world_size, kind) as job:
        job.hear("ready")
        time.sleep(0.15)
        pid, killed = job.pid(1), job.signal(1, signal.SIGKILL)
        results = job.results(10)
    operation = kind.removeprefix("large ").partition(" ")[0].replace("loop", "all_reduce")
    operation = "all_reduce" if kind in ("wait", "future") else operation
    for fault in [results[0], *results[2:]]:
        # A future carries its error through torch, which makes a plain RuntimeError of it.
        assert fault.kind == ("RuntimeError" if kind == "future" else "PeerLostError"), fault
        fault.says(fault.kind, rf"rank 1 \(pid {pid} on {HOST}\)", "dead", "killed", rf"{operation}\(")
        assert fault.at - killed < 1.0


def between(rank: int, world_size: int) -> Fault | None:
    """Everybody computes; rank 1 dies meanwhile; the next call finds it dead."""
    dist.barrier()
    tell("ready")
    if rank == 1:
        time.sleep(60)
    time.sleep(0.4)
    return attempt(dist.barrier)


def test_killed_between_calls() -> None:
    with Job(between, 3) as job:
        job.hear("ready")
        pid = job.pid(1)
        job.signal(1, signal.SIGKILL)
        first, _, third = job.results(10)
    for fault in (first, third):
        fault.says(
            "PeerLostError", rf"rank 1 \(pid {pid} on {HOST}\) is dead", r"barrier\(\), call no\. 2 of the default"
        )
        assert fault.seconds < 1.0


def in_the_midst(rank: int, world_size: int) -> Fault | None:
    """Rank 1 is killed in a call to which rank 2 does not come."""
    dist.barrier()
    tell("ready")
    if rank == 2:
        time.sleep(60)
    return attempt(lambda: dist.all_reduce(torch.zeros(4)))


def test_killed_in_a_call_to_which_another_rank_is_late() -> None:
    with Job(in_the_midst, 3) as job:
        job.hear("ready")
        time.sleep(0.15)
        pid, killed = job.pid(1), job.signal(1, signal.SIGKILL)
        fault = job.result(0, 10)
    fault.says("PeerLostError", rf"rank 1 \(pid {pid} on {HOST}\) is dead: .*killed.*; it had come to this call")
    assert fault.at - killed < 1.0


ENDINGS: dict[str, tuple[str, list[str]]] = {
    # the end of rank 1's program, and what the others must read of it
    "exception": ("raise ValueError('the data of shard 7 is broken')", ["ValueError", "the data of shard 7 is broken"]),
    "exception in a function": (
        "def load():\n    return {}['label']\ndef main():\n    load()\nmain()",
        [r"ended by KeyError: 'label', at \S+:\d+ in load"],
    ),
    "sys.exit": ("sys.exit(3)", ["rank 1", "end"]),
    "an exception beside a thread": (
        "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\nraise OSError('no such shard')",
        ["ended by OSError: no such shard"],
    ),
    "an exception told to a later hook": (
        "sys.excepthook = lambda *_: None\nraise ValueError('bad shard')",
        ["ended by ValueError: bad shard"],
    ),
    "an exception caught and noted, as debuggers do": (
        "def check():\n try:\n  1 / 0\n except ArithmeticError as error:\n  sys.last_value = error\ncheck()",
        ["without destroy_process_group"],
    ),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)", ["KeyboardInterrupt"]),
    "os._exit": ("os._exit(7)", ["exit code 7"]),
    "exec": ("os.execv('/bin/sleep', ['sleep', '60'])", ["has replaced itself by another program"]),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ["killed by SIGKILL"]),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", ["killed by SIGSEGV"]),
    "the end": ("", ["without destroy_process_group"]),
    "destroyed": ("dist.destroy_process_group()", ["has left the group"]),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_program_ended(name: str) -> None:
    text, facts = ENDINGS[name]
    with Job(waits, 2, scripts={1: f"dist.barrier()\n{text}"}) as job:
        fault = job.results(30)[0]
        pid = job.pid(1)
    fault.says(
        "PeerLostError", rf"rank 1 \(pid {pid} on {HOST}\)", r"all_reduce\(float32 \[3\], SUM\), call no\. 2", *facts
    )


def _leave(leave: Callable[..., None], errors: Iterator[Exception], *args: Any) -> None:
    for error in errors:
        raise error
    leave(*args)


def leaves_badly(rank: int, world_size: int) -> list[Fault]:
    """Rank 1 ends by an exception, and fails to leave the first of its groups."""
    groups = [None, dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        dist.barrier(group)
    if rank == 1:
        outcomes = iter([OSError("too many open files")])
        patch.object(
            Group, "_publish_left", autospec=True, side_effect=partial(_leave, Group._publish_left, outcomes)
        ).start()
        raise ValueError("bad shard")
    return [attempt(lambda group=group: dist.barrier(group)) for group in groups]  # type: ignore[misc]


def test_a_group_that_can_not_be_left_does_not_silence_the_others() -> None:
    with Job(leaves_badly, 2) as job:
        faults = job.result(0, 10)
    assert [fault.kind for fault in faults] == ["PeerLostError"] * 3
    assert sum("ended by ValueError: bad shard" in fault.text for fault in faults) == 2


def waits(rank: int, world_size: int) -> Fault:
    dist.barrier()
    return attempt(lambda: dist.all_reduce(torch.zeros(3)))


def fails(rank: int, world_size: int) -> Fault:
    dist.barrier()
    if rank == 1:
        raise OverflowError("loss is 1e+38")
    if rank == 2:
        sys.exit("the disk is full")
    return attempt(lambda: dist.all_reduce(torch.zeros(3)))


def test_exception_in_a_multiprocessing_child() -> None:
    with Job(fails, 3) as job:
        first, _, _ = job.results(10)
        pids = [job.pid(1), job.pid(2)]
    assert first.kind == "PeerLostError"
    assert f"rank 1 (pid {pids[0]} on {HOST})" in first.text or f"rank 2 (pid {pids[1]} on {HOST})" in first.text
    assert "OverflowError: loss is 1e+38" in first.text or "rank 2" in first.text


def quotes(rank: int, world_size: int, meeting: str, path: str) -> None:
    """For mp.spawn: rank 1 raises, rank 0 writes down what it read."""
    init(meeting, rank, world_size, 30.0)
    dist.barrier()
    if rank == 1:
        raise LookupError("no such shard")
    fault = attempt(lambda: dist.all_reduce(torch.zeros(3)))
    with open(path, "w") as file:
        file.write(f"{fault.kind}: {fault.text}")
    dist.destroy_process_group()


def test_exception_in_spawned_ranks(tmp_path: Any) -> None:
    """torch.multiprocessing catches the exception itself and ends the process by sys.exit."""
    import torch.multiprocessing as mp

    path = tmp_path / "text"
    context = mp.start_processes(
        quotes, (2, str(tmp_path / "meeting"), str(path)), nprocs=2, join=False, start_method="forkserver"
    )
    with pytest.raises(mp.ProcessRaisedException, match="no such shard"):
        context.join(timeout=20, grace_period=5)
    text = path.read_text()
    assert text.startswith("PeerLostError: all_reduce(")
    assert "rank 1" in text
    assert "LookupError: no such shard" in text


def chain(rank: int, world_size: int) -> Fault:
    """Rank 3 dies; each other one waits for the next in a group of two, and gives up with a long story of its own."""
    pairs = [dist.new_group([r, r + 1]) for r in range(world_size - 1)]
    dist.barrier()
    if rank == 3:
        os._exit(1)
    fault = attempt(lambda: dist.all_reduce(torch.zeros(1), group=pairs[rank]))
    if rank:
        raise RuntimeError("a story " * 1000)
    return fault


def test_the_one_who_died_first_is_blamed_however_long_the_chain() -> None:
    with Job(chain, 4) as job:
        fault = job.results(10)[0]
        pid = job.pid(3)
    first = rf"can not end: rank 1 missing: rank 3 \(pid {pid} on {HOST}\) is dead: [^;]*; rank 1 "
    fault.says("PeerLostError", first)


def half_way_out(rank: int, world_size: int) -> Fault | None:
    """Rank 2 dies; rank 1 hears of it and has left the default group, but not yet the one in which rank 0 waits."""
    pairs = [dist.new_group([r, r + 1]) for r in range(world_size - 1)]
    dist.barrier()
    if rank == 2:
        os._exit(1)
    fault = attempt(lambda: dist.all_reduce(torch.zeros(1), group=pairs[rank]))
    if rank == 0:
        return fault
    dist.distributed_c10d._get_default_group().shutdown()
    time.sleep(60)
    return None


def test_the_one_who_died_first_is_blamed_by_a_rank_that_is_half_way_out() -> None:
    with Job(half_way_out, 3) as job:
        fault = job.result(0, 10)
        pid = job.pid(2)
    fault.says("PeerLostError", rf"can not end: rank 1 missing: rank 2 \(pid {pid} on {HOST}\) is dead: [^;]*; rank 1 ")


def paused(rank: int, world_size: int) -> list[Any]:
    """A rank stopped for seconds is late, not lost."""
    dist.barrier()
    tell("ready")
    x = torch.ones(1)
    faults = [attempt(lambda: dist.all_reduce(x)) for _ in range(2000)]
    message = torch.ones(2_000_000)
    faults.append(attempt(lambda: dist.recv(message, 1) if rank == 0 else rank == 1 and dist.send(message, 0)))
    return [[f.text for f in faults if f.kind], float(x)]


def stop_for_five_seconds() -> list[Any]:
    with Job(paused, 3) as job:
        job.hear("ready")
        time.sleep(0.02)
        job.signal(1, signal.SIGSTOP)
        time.sleep(5)
        job.signal(1, signal.SIGCONT)
        return job.results(30)


@pytest.fixture(scope="module", autouse=True)
def stopped() -> Iterator[Future[list[Any]]]:
    """That job's results, which has been waiting for most of its time since the first test of this file began."""
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(stop_for_five_seconds)


def test_stopped_for_five_seconds(stopped: Future[list[Any]]) -> None:
    results = stopped.result()
    assert [errors for errors, _ in results] == [[], [], []]
    assert len({value for _, value in results}) == 1


def leaves(rank: int, world_size: int) -> str:
    """Ranks that destroy their group at different times, all calls done."""
    dist.all_reduce(torch.ones(1000))
    if rank != 1:
        time.sleep(0.3 * rank)
    dist.destroy_process_group()
    return "left"


def test_leaving_at_different_times_is_no_loss() -> None:
    with Job(leaves, 3) as job:
        assert job.results(10) == ["left"] * 3
