"""What can be seen of a job from outside, while it runs, hangs, is stopped or loses a rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hangs.job import Job, tell
from unisono.runtime.header import Header
from unisono.transport.layout import ISSUE_TIMES, JOINED
from unisono.transport.process import Identity
from unisono.watch import status, status_page
from unisono.watch.segment_reader import Findings, Member, SegmentView
from unisono.watch.status import RankStatus, snapshot


def see(job: Job, enough: Callable[[status.Job], bool], seconds: float = 20.0) -> status.Job:
    """The job as soon as it looks like that."""
    end = time.monotonic() + seconds
    while True:
        found = snapshot(job.pid(0))
        if len(found) == 1 and enough(found[0]):
            return found[0]
        assert time.monotonic() < end, found
        time.sleep(0.02)


def one_sleeps(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    for _ in range(3):
        dist.barrier()
    if rank == 3:
        tell("asleep")
        time.sleep(60)
    if rank == 0:
        dist.recv(torch.zeros(7), 3)
    if rank == 1:
        dist.all_reduce(torch.zeros(4, 5), group=group)
    dist.broadcast(torch.zeros(8), 3)


def test_a_hung_job() -> None:
    with Job(one_sleeps, 4) as job:
        seen = see(job, lambda j: all(r.seconds > 1.1 for r in j.ranks) and j.ranks[1].group != j.ranks[2].group)
        first, second, third, last = seen.ranks
        assert [r.pid for r in seen.ranks] == [job.pid(r) for r in range(4)]
        assert (first.state, first.call) == ("waiting", "recv(float32 [7]) from rank 3")
        assert (second.state, second.call, second.number) == ("waiting", "all_reduce(float32 [4, 5], SUM)", 1)
        assert (second.group, second.nbytes, second.waits_for) == ("group 1 [0, 1]", 80, (0,))
        assert (third.state, third.call, third.number) == ("waiting", "broadcast(float32 [8], root 3)", 4)
        assert third.waits_for == (0, 1, 3)
        assert third.place.endswith("in one_sleeps")
        assert (last.state, last.call, last.number, last.waits_for) == ("elsewhere", "barrier()", 3, ())
        assert [(g.label, g.ranks, g.completed) for g in seen.groups] == [
            ("the default group", (0, 1, 2, 3), 3),
            ("group 1 [0, 1]", (0, 1), 0),
        ]
        (remark,) = seen.remarks
        assert remark.startswith("rank 3 keeps ranks 0, 2 waiting for 1.")
        assert remark.endswith("it is outside unisono, after call no. 3 barrier()")
        stacks = status_page.stacks(seen.identities)
        assert "in one_sleeps" in stacks[3]
        assert "in broadcast" in stacks[2]


def never_ending(rank: int, world_size: int) -> None:
    tell("there")
    while True:
        if rank == 1:
            time.sleep(0.02)
        dist.all_reduce(torch.ones(16))


def test_a_stopped_rank_and_a_late_one() -> None:
    with Job(never_ending, 3) as job:
        seen = see(job, lambda j: j.ranks[1].straggler and j.groups[0].compared > 8 and bool(j.remarks))
        assert [r.straggler for r in seen.ranks] == [False, True, False]
        assert 0.015 < seen.ranks[1].late < 2.0
        assert 0 < seen.groups[0].per_second < 100
        assert seen.remarks[0].startswith("rank 1 comes last: ")
        job.signal(2, signal.SIGSTOP)
        seen = see(job, lambda j: j.ranks[0].seconds > 1.0)
        assert seen.ranks[2].state == "stopped"
        assert 2 in seen.ranks[0].waits_for
        assert any(r.startswith("rank 2 keeps rank") and "stopped, by a signal" in r for r in seen.remarks)
        before = seen.groups[0].completed
        assert "does not answer" in status_page.stacks(seen.identities)[2]
        job.signal(2, signal.SIGCONT)
        see(job, lambda j: j.groups[0].completed > before + 3)


def apart(rank: int, world_size: int) -> None:
    dist.barrier()
    tell("there")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        dist.destroy_process_group()
    time.sleep(60)


def test_a_dead_rank_and_one_that_has_left() -> None:
    with Job(apart, 3) as job:
        job.hear("there", [0, 2])
        seen = see(job, lambda j: [r.state for r in j.ranks] == ["elsewhere", "dead", "left"])
        words = seen.ranks[1].words  # how it ended is known until its parent has asked
        assert words in ("killed by SIGKILL", "it ended without a word (killed, or by os._exit)")
        assert seen.ranks[2].words == "has left the group (destroy_process_group)"
        assert seen.remarks == (f"rank 1 is dead: {words}",)


def _member(rank: int, moments: list[int], completed: int) -> Member:
    ring = [0] * ISSUE_TIMES
    for number, moment in enumerate(moments, 1):
        ring[number % ISSUE_TIMES] = moment
    return Member(rank, Identity(rank + 10, 1), JOINED, completed, len(moments), completed, 7, tuple(ring), None, "")


def test_delays_are_taken_over_the_calls_that_all_ranks_still_know() -> None:
    early = _member(0, [1_000_000 * k for k in range(1, 21)], 19)
    late = _member(1, [1_000_000 * k + 500_000 for k in range(1, 20)], 18)
    memory = SegmentView("the default group", (early, late), 0)
    compared, delays = memory.lateness()
    assert compared == 15  # calls 5 to 19: the first rank has forgotten call 4, the second has not issued call 20
    assert delays == {0: 0.0, 1: 0.0005}
    assert early.issued_at(4) == early.issued_at(21) == 0
    assert early.since == early.issued_at(20) == 20_000_000


def test_the_pace_is_that_of_the_moment_at_which_the_memory_was_read() -> None:
    """However long ago that was: who reads may have waited for a core since."""
    member = _member(0, [20_000_000 * k for k in range(1, 11)], 10)
    assert SegmentView("the default group", (member,), 220_000_000).pace() == pytest.approx(50)
    assert SegmentView("the default group", (member,), 1_300_000_000).pace() == 0  # idle for more than a second then


def test_jobs_are_groups_that_share_processes() -> None:
    a, b, c = (_member(rank, [1], 1) for rank in range(3))
    pair, whole, other = (
        SegmentView("g [0, 1]", (a, b), 0),
        SegmentView("the default group", (a, b, c), 0),
        _member(0, [1], 1),
    )
    stranger = SegmentView("the default group", (Member(**{**vars(other), "who": Identity(99, 2)}),), 0)
    found = status._together([pair, stranger, whole])
    assert [[m.label for m in job] for job in found] == [["the default group"], ["the default group", "g [0, 1]"]]
    assert snapshot(find=lambda: Findings((stranger,), {})) == []  # none of its processes lives


def test_words() -> None:
    pieces = Header("all_to_all", "float32", (), "", -1, 0, (1, 2), (3, 4))
    assert (pieces.describe(), pieces.nbytes) == ("all_to_all(float32, 3 elements)", 12)
    assert Header("reduce", "int8", (3,), "MAX", 1, 3).describe([4, 9]) == "reduce(int8 [3], MAX, root 9)"
    waits = RankStatus(0, 1, "waiting", "barrier()", 3, waits_for=(1,), seconds=2.0)
    waited = RankStatus(1, 2, "waiting", "barrier()", 3, waits_for=(2,), seconds=2.0)
    assert status.remarks([waits, waited, RankStatus(2, 3, "absent", words="has not joined")], 0) == (
        "rank 2 keeps rank 1 waiting for 2 s: it has not joined",
    )


def test_it_does_without_torch() -> None:
    program = "import sys, unisono.cli.ps; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
