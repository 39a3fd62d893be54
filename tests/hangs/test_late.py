"""A rank that does not come in time: the error says who has come, who has not, and what the missing one does."""

import datetime
import re
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, hurry, line_of, tell

LIMIT = datetime.timedelta(seconds=0.5)


def dawdle(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)  # this is where the late rank is


def group_timeout(rank: int, world_size: int) -> Fault:
    hurry(0.5)
    dist.all_reduce(torch.zeros(2, 3))
    if rank == 1:
        dawdle(2.0)
        return attempt(lambda: dist.broadcast(torch.zeros(7), 0))  # the others' data lies there, but they are gone
    return attempt(lambda: dist.broadcast(torch.zeros(7), 0))


def test_group_timeout() -> None:
    with Job(group_timeout, 3) as job:
        first, second, third = job.results(15)
        pid = job.pid(1)
    for fault in (first, third):
        fault.says(
            "CollectiveTimeout",
            r"broadcast\(float32 \[7\], root 0\), call no\. 3 of the default group",
            r"within its timeout of 0\.5 s",
            r"rank 1 missing \(arrived: 0, 2\)",
            rf"rank 1 \(pid {pid} on .*\) last completed call no\. 2 all_reduce\(float32 \[2, 3\], SUM\) \d\.\d s ago",
            f"now at .*{line_of(dawdle, 'where the late rank is')}in dawdle",
        )
        assert 0.5 <= fault.seconds < 1.6
    second.says("PeerLostError", r"broadcast\(", r"rank 0 .* has given this group up: .*timeout|rank 0 .* ended")


def unlimited(rank: int, world_size: int, meeting: str) -> float:
    """The largest timeout there is, in every place that takes one; rank 1 comes late."""
    limit = datetime.timedelta.max
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=world_size, timeout=limit)
    group, x = dist.new_group([0, 1], timeout=limit), torch.ones(1)
    time.sleep(0.15 * rank)
    dist.all_reduce(x, group=group)
    time.sleep(0.15 * rank)
    dist.all_reduce(x, async_op=True).wait(limit)
    return float(x)


def test_the_largest_timeout_is_none(tmp_path: Any) -> None:
    with Job(unlimited, 2, str(tmp_path / "meeting"), group=False) as job:
        assert job.results(10) == [4.0, 4.0]


def wait_timeout(rank: int, world_size: int) -> list[object]:
    """The call goes on after a wait that was too short."""
    x = torch.ones(2)
    if rank == 1:
        time.sleep(1.2)
        dist.all_reduce(x)
        return [x.tolist()]
    work = dist.all_reduce(x, async_op=True)
    fault = attempt(lambda: work.wait(LIMIT))
    still = work.is_completed()
    work.wait()
    return [x.tolist(), fault, still]


def test_wait_with_a_timeout_of_its_own() -> None:
    with Job(wait_timeout, 2) as job:
        first, second = job.results(15)
    assert first[0] == second[0] == [2.0, 2.0]
    place = rf"at \S*{line_of(wait_timeout, 'work = dist.all_reduce')}in wait_timeout"
    call = rf"^all_reduce\(float32 \[2\], SUM\), call no\. 1 of the default group, {place}, did not end"
    first[1].says("CollectiveTimeout", call, "rank 1 missing", r"0\.5 s")
    assert 0.5 <= first[1].seconds < 1.5
    assert first[2] is False


def subgroup_timeout(rank: int, world_size: int) -> list[Fault]:
    group = dist.new_group([0, 2], timeout=LIMIT)
    faults = []
    if rank == 2:
        time.sleep(1.6)
    elif rank == 0:
        faults.append(attempt(lambda: dist.all_reduce(torch.zeros(1), group=group)))
        faults.append(attempt(lambda: dist.all_reduce(torch.zeros(1), group=group)))
    dist.barrier()  # the default group is none the worse
    return faults


def test_new_group_with_a_timeout() -> None:
    with Job(subgroup_timeout, 3) as job:
        first, again = job.results(15)[0]
    first.says("CollectiveTimeout", r"group \d+ \[0, 2\]", "rank 2", r"0\.5 s", "test_late.py")
    assert 0.5 <= first.seconds < 1.5
    again.says("CollectiveTimeout", "failed before and can only be destroyed", "rank 2")
    assert again.seconds < 0.2


def messages(rank: int, world_size: int) -> list[Fault]:
    hurry(1.5)
    if rank == 1:
        dawdle(60)
        return []
    x = torch.zeros(3_000_000)
    recv = dist.irecv(x, 1)
    send = dist.isend(x.clone(), 1)
    assert recv is not None
    assert send is not None
    faults = [attempt(lambda: recv.wait(LIMIT)), attempt(lambda: send.wait(LIMIT))]
    return [*faults, attempt(recv.wait)]


def test_messages() -> None:
    with Job(messages, 2) as job:
        waited, sent, own = job.result(0, 15)
    place = line_of(dawdle, "where the late rank is")
    waited.says("CollectiveTimeout", r"recv\(float32 \[3000000\]\) from rank 1", r"0\.5 s", place)
    sent.says("CollectiveTimeout", r"send\(float32 \[3000000\]\) to rank 1", r"\d+ of 12000000 bytes", place)
    issued = rf"\(tag 0, the default group\), at \S*{line_of(messages, 'recv = dist.irecv')}in \w+, did not end"
    own.says("CollectiveTimeout", r"recv\(float32 \[3000000\]\) from rank 1", r"timeout of 1\.5 s", place, issued)


def goes_on(rank: int, world_size: int) -> Fault:
    """Rank 1 loses rank 2 and lives with it; rank 0 waits for it, and reads what has become of rank 1's message."""
    hurry(1.0)
    tell("ready")
    if rank == 2:
        time.sleep(60)
    fault = attempt(lambda: dist.recv(torch.zeros(3), rank + 1))
    if rank == 1:
        time.sleep(1.5)
    return fault


def test_what_a_late_rank_has_lost_is_told() -> None:
    with Job(goes_on, 3) as job:
        job.hear("ready")
        job.signal(2, signal.SIGKILL)
        late = job.result(0, 15)
        pid = job.pid(2)
    late.says("CollectiveTimeout", "recv.* from rank 1", r"failed: PeerLostError: recv.* from rank 2", rf"pid {pid} ")


def stopped(rank: int, world_size: int) -> Fault:
    hurry(0.8)
    tell("ready")
    if rank == 1:
        time.sleep(60)
    return attempt(lambda: dist.all_reduce(torch.zeros(1)))


def test_a_stopped_rank_is_said_to_be_stopped() -> None:
    with Job(stopped, 2) as job:
        job.hear("ready")
        job.signal(1, signal.SIGSTOP)
        fault = job.result(0)
    fault.says("CollectiveTimeout", r"rank 1 \(pid \d+ on .*\) last completed call no\. 1 barrier\(\)", "it is stopped")


def given_up(rank: int, world_size: int) -> Fault:
    """Rank 0 waits for rank 1 alone, which is stopped, and rank 2 for both, for longer."""
    hurry(0.8 if rank == 0 else 10.0)
    tell("ready")
    if rank == 1:
        time.sleep(60)
    x = torch.zeros(1)
    return attempt((lambda: dist.all_reduce(x)) if rank == 2 else (lambda: dist.send(x.expand(1 << 21).clone(), 1)))


def test_who_waits_for_a_rank_that_has_given_up_over_a_stopped_one_reads_of_that() -> None:
    with Job(given_up, 3) as job:
        job.hear("ready")
        job.signal(1, signal.SIGSTOP)
        first, last = job.result(0), job.result(2)
    first.says("CollectiveTimeout", "rank 1 .*it is stopped")
    last.says(
        "PeerLostError",
        r"rank 1 \(pid \d+ on .*\) last completed call no\. 1 barrier\(\) .*; it is stopped \(by a signal",
        r"rank 0 \(pid \d+ on .*\) (has given this group up over it|ended .* after an error: send)",
    )


def busy(rank: int, world_size: int) -> Fault:
    """The late rank computes in one long call that keeps the interpreter lock."""
    hurry(0.4)
    if rank == 1:
        re.match(r"(a|aa)+$", "a" * 42 + "b")
        return Fault("", "", 0, 0)
    time.sleep(0.5)
    return attempt(lambda: dist.all_reduce(torch.zeros(1)))


def test_a_rank_that_does_not_answer_is_said_to_be_busy() -> None:
    with Job(busy, 2) as job:
        fault = job.result(0)
    fault.says("CollectiveTimeout", "rank 1", "does not answer")
