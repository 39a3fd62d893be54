"""Groups that do not come together: ranks missing, claimed twice, of another world size; new_group not called alike."""

import datetime
import os
import resource
import signal
import time
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, init, line_of, tell
from ports import free_port
from unisono.transport.layout import Layout
from unisono.transport.process import OwnThread

LIMIT = datetime.timedelta(seconds=1.0)
HOST = os.uname().nodename


def joins(rank: int, world_size: int, meeting: str, seats: list[tuple[int, int] | None], limit: float) -> Fault:
    """Joins as the rank and with the world size of its seat, if it has one."""
    seat = seats[rank]
    if seat is None:
        time.sleep(60)
    assert seat is not None
    return attempt(lambda: init(meeting, seat[0], seat[1], limit))


def join(path: Any, seats: list[tuple[int, int] | None], limit: float) -> tuple[list[Fault | None], list[int]]:
    with Job(joins, len(seats), str(path / "meeting"), seats, limit, group=False) as job:
        faults = [job.result(k, 20) if seat else None for k, seat in enumerate(seats)]
        return faults, [job.pid(k) for k in range(len(seats))]


def test_a_rank_is_missing_at_the_start(tmp_path: Any) -> None:
    faults, _ = join(tmp_path, [(0, 3), None, (2, 3)], 1.0)
    for fault in (faults[0], faults[2]):
        assert fault is not None
        fault.says("CollectiveTimeout", "rank 1 did not join within 1 s", "world size 3", "joined: 0, 2")
        assert fault.seconds < 2.0


def test_the_first_rank_is_missing_at_the_start(tmp_path: Any) -> None:
    faults, _ = join(tmp_path, [None, (1, 3), (2, 3)], 1.0)
    for fault in faults[1:]:
        assert fault is not None
        fault.says("CollectiveTimeout", "rank 0 did not join", "same address, port or file")
        assert fault.seconds < 2.0


def joins_poorly(rank: int, world_size: int, meeting: str, poor: int) -> Fault:
    """The address space of one rank has less room than the group's memory takes; that rank lives on."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == poor:
        size = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), limits[1]))
    fault = attempt(lambda: init(meeting, rank, world_size, 20.0))
    if rank == poor:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        tell(fault.kind)
        time.sleep(60)
    return fault


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_that_can_not_share_memory_says_so(poor: int, tmp_path: Any) -> None:
    words = r"can not share the memory of the default group \(.* MiB\): .* raise the limits"
    with Job(joins_poorly, 3, str(tmp_path / "meeting"), poor, group=False) as job:
        for rank in {0, 1, 2} - {poor}:
            fault = job.result(rank, 20)
            assert fault is not None
            fault.says("PeerLostError", rf"rank {poor} .*{words}")
        job.hear("UnisonoError", [poor])


def attempts(rank: int, world_size: int, meeting: str, late: int | None) -> list[float]:
    """The first attempt of a job (``late`` is None) dies; in the second, over the same store, one rank comes late."""
    if rank == late:
        time.sleep(0.3)
    init(meeting, rank, world_size, 10.0)
    if late is None:
        dist.barrier()
        os._exit(1)
    return [total(None), total(dist.new_group([0, 1]))]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("before", [2, 3], ids=["same size", "other size"])
def test_a_job_is_started_again_over_the_same_store(late: int, before: int, tmp_path: Any) -> None:
    meeting = str(tmp_path / "meeting")
    with Job(attempts, before, meeting, None, group=False) as job:
        job.results()
    with Job(attempts, 2, meeting, late, group=False) as job:
        assert job.results() == [[3.0, 3.0]] * 2


def joins_without_files(rank: int, world_size: int, port: int, poor: int) -> Fault:
    """One rank may open no file once it has loaded the library and reached the store; it lives on."""
    import unisono.backend.device_group
    import unisono.backend.device_patches
    import unisono.backend.object_patches
    import unisono.backend.process_group  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == poor:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    fault = attempt(lambda: dist.init_process_group("unisono", store=store, rank=rank, world_size=world_size))
    if rank == poor:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    done = store.add("done", 1)
    while rank == 0 and done < world_size:  # the store lives here
        time.sleep(0.01)
        done = store.add("done", 0)
    return fault


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_that_can_open_no_file_says_so(poor: int) -> None:
    with Job(joins_without_files, 2, free_port(), poor, group=False) as job:
        for rank, fault in enumerate(job.results()):
            kind = "UnisonoError" if rank == poor else "PeerLostError"
            fault.says(kind, rf"rank {poor} .*Too many open files.*; raise the limits")
            assert fault.seconds < 2.5


def joins_without_threads(rank: int, world_size: int, meeting: str) -> Fault:
    """Rank 1 can start no thread when it joins; it lives on."""
    if rank == 1:
        with patch.object(OwnThread, "start", side_effect=RuntimeError("can't start new thread")):
            fault = attempt(lambda: init(meeting, rank, world_size, 20.0))
        time.sleep(60)
        return fault

    def meets() -> None:
        init(meeting, rank, world_size, 20.0)
        dist.barrier()

    return attempt(meets)


def test_a_rank_that_fails_while_it_joins_is_not_waited_for(tmp_path: Any) -> None:
    with Job(joins_without_threads, 2, str(tmp_path / "meeting"), group=False) as job:
        fault = job.result(0, 10)
        pid = job.pid(1)
    fault.says("PeerLostError", rf"rank 1 \(pid {pid} on {HOST}\) could not join it \(RuntimeError: can't start new")
    assert fault.seconds < 2.0


def joins_in_another_version(rank: int, world_size: int, meeting: str) -> Fault:
    if rank == 1:
        Layout.RECORD *= 2  # type: ignore[misc]
    return attempt(lambda: init(meeting, rank, world_size, 1.5))


def test_another_version(tmp_path: Any) -> None:
    with Job(joins_in_another_version, 2, str(tmp_path / "meeting"), group=False) as job:
        first, other = job.results()
        pid = job.pid(0)
    other.says("UsageError", rf"rank 1 runs another version of unisono than rank 0 \(pid {pid}\): give all ranks one")
    assert "rank 1" in first.text


def test_another_world_size(tmp_path: Any) -> None:
    faults, pids = join(tmp_path, [(0, 2), (1, 3)], 1.5)
    for k, fault in enumerate(faults):
        assert fault is not None
        fault.says(
            "MismatchError",
            rf"rank {k} \(pid {pids[k]} on {HOST}\) was started with world_size {k + 2}",
            rf"rank {1 - k} \(pid {pids[1 - k]} on {HOST}\) with {3 - k}",
        )
        assert fault.seconds < 1.0


def dies_early(rank: int, world_size: int) -> Fault:
    """Rank 1 dies before it has made two groups: one of which it would be the first rank, one where it is the last."""
    if rank == 1:
        os._exit(5)
    first = dist.new_group([1, 2], timeout=LIMIT * 20, use_local_synchronization=True) if rank == 2 else None
    last = dist.new_group([0, 1], timeout=LIMIT * 20, use_local_synchronization=True) if rank == 0 else None
    return attempt(lambda: dist.all_reduce(torch.zeros(1), group=first if rank == 2 else last))


def test_a_rank_that_died_before_it_made_the_group() -> None:
    with Job(dies_early, 3) as job:
        first, _, third = job.results(20)
        pid = job.pid(1)
    for fault in (first, third):
        assert fault.kind in ("PeerLostError", "DistStoreError"), fault
        assert "rank 1" in fault.text
        assert fault.seconds < 2.0
    assert pid


def no_founder(rank: int, world_size: int) -> Fault | None:
    """All make a group; its first rank dies before its first call there."""
    group = dist.new_group([1, 2])
    dist.barrier()
    if rank == 1:
        os._exit(5)
    return attempt(lambda: dist.all_reduce(torch.zeros(1), group=group)) if rank == 2 else None


def test_the_first_rank_of_a_group_dies_before_others_have_joined_it() -> None:
    with Job(no_founder, 3) as job:
        fault = job.results(10)[2]
        pid = job.pid(1)
    fault.says("PeerLostError", rf"rank 1 \(pid {pid} on {HOST}\) is dead", r"\[1, 2\]")
    assert fault.seconds < 1.0


def total(group: Any) -> float:
    x = torch.tensor([float(1 << dist.get_rank())])
    dist.all_reduce(x, group=group)
    return float(x)


def disjoint(rank: int, world_size: int) -> float:
    return total(dist.new_group([0, 3] if rank in (0, 3) else [1, 2], timeout=LIMIT))


def test_disjoint_lists_at_one_place_are_two_groups() -> None:
    with Job(disjoint, 4) as job:
        assert job.results(10) == [9.0, 6.0, 6.0, 9.0]


def other_order(rank: int, world_size: int) -> list[float]:
    """Lists of different members in another order on rank 1: groups are known by their members."""
    lists = [[0, 1], [1, 2]] if rank != 1 else [[1, 2], [0, 1]]
    made = {tuple(ranks): dist.new_group(ranks, timeout=LIMIT) for ranks in lists}
    return [total(made[ranks]) for ranks in sorted(made) if rank in ranks]


def test_another_order_of_different_groups_is_understood() -> None:
    with Job(other_order, 3) as job:
        assert job.results(10) == [[3.0], [3.0, 6.0], [6.0]]


def other_list(rank: int, world_size: int) -> Fault:
    return attempt(lambda: total(dist.new_group([0, 1] if rank < 2 else [1, 2], timeout=LIMIT * 20)))


def test_different_lists() -> None:
    with Job(other_list, 3) as job:
        first, second, third = job.results(10)
    third.says("MismatchError", "new_group", r"rank 2 made a group of \[1, 2\]", r"rank 1 made one of \[0, 1\]")
    assert third.seconds < 1.0
    assert first.kind == second.kind == ""


def skips(rank: int, world_size: int, who: int, then: str) -> Fault:
    """One rank does not make the group that the others make of all ranks, and does something else."""
    if rank == who:
        if then == "collective":
            return attempt(lambda: total(None))
        if then == "ends":
            raise SystemExit
        if then == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    group = dist.new_group([0, 1, 2], timeout=LIMIT)
    return attempt(lambda: total(group))


EXPECTED: dict[str, tuple[str, list[str]]] = {
    "collective": ("DeadlockError", [r"group \d+ \[0, 1, 2\]", "the default group", line_of(total, "dist.all_reduce")]),
    "ends": ("PeerLostError", ["ended"]),
    "sleeps": ("CollectiveTimeout", [r"group \d+ \[0, 1, 2\]", line_of(skips, "time.sleep(60)")]),
    "stops": ("CollectiveTimeout", [r"group \d+ \[0, 1, 2\]", "it is stopped"]),
}


@pytest.mark.parametrize("then", EXPECTED)
@pytest.mark.parametrize("who", [0, 2], ids=["first", "last"])
def test_a_member_skips_new_group(who: int, then: str) -> None:
    """The first one makes the group's memory; the others would come later."""
    kind, facts = EXPECTED[then]
    others = [rank for rank in range(3) if rank != who]
    with Job(skips, 3, who, then) as job:
        faults = [job.result(rank, 10) for rank in others]
        if then == "collective":
            # The one and either of the others are a cycle; the third is in it too, or reads what the one died of.
            job.result(who, 10).says(kind, *facts)
            assert sorted(fault.kind for fault in faults)[0] == kind
            assert all("these ranks wait for each other" in fault.text for fault in faults), faults
            return
    for fault in faults:
        fault.says(kind, f"rank {who}", *facts)
        assert fault.seconds < 2.0


def fewer(rank: int, world_size: int) -> list[float]:
    """Only the members make a pair; torch counts its groups differently from then on, and nobody minds."""
    sums = []
    if rank in (0, 2):
        sums.append(total(dist.new_group([0, 2], timeout=LIMIT, use_local_synchronization=True)))
    sums.append(total(dist.new_group([0, 1, 2], timeout=LIMIT, use_local_synchronization=True)))
    return sums


def test_groups_made_by_their_members_only() -> None:
    with Job(fewer, 3) as job:
        assert job.results(10) == [[5.0, 7.0], [7.0], [5.0, 7.0]]


def leaves_a_group(rank: int, world_size: int, how: str) -> Fault | None:
    """Rank 1 ends, in one way or another, before its first call in a group that rank 2 waits in."""
    group = dist.new_group([2, 1])
    dist.barrier()
    if rank == 1:
        if how == "exception":
            raise ArithmeticError("no more numbers")
        dist.destroy_process_group(group if how == "left this group" else None)
        time.sleep(60)
    return attempt(lambda: dist.all_reduce(torch.zeros(1), group=group)) if rank == 2 else None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exception", ".*ended by ArithmeticError: no more numbers"),
        ("left", "has left the group"),
        ("left this group", "has left the group"),
    ],
)
def test_a_rank_is_gone_before_its_first_call_in_a_group(how: str, words: str) -> None:
    with Job(leaves_a_group, 3, how) as job:
        fault = job.result(2, 10)
        pid = job.pid(1)
    fault.says("PeerLostError", rf"rank 1 \(pid {pid} on {HOST}\) {words}")
    assert fault.seconds < 1.0
