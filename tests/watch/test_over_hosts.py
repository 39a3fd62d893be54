"""Waits for ranks of other hosts: deadlocks are found and drawn as on one host, and nothing else is taken for one."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from backend.test_hosts import on_hosts
from hangs.job import Fault, Job, attempt, init, tell
from ranks import ranks
from unisono.watch import clocks
from unisono.watch.other_hosts import with_other_hosts
from unisono.watch.status import snapshot

WAIT = 20.0  # s, the timeout of the group: a deadlock is found long before


def both_receive(rank: int, world_size: int, meeting: str) -> Fault:
    """The first and the last rank receive from each other; the others wait for them in a barrier."""
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, WAIT)
        other = {0: 3, 3: 0}.get(rank)
        fault = attempt(lambda: dist.recv(torch.empty(4), other) if other is not None else dist.barrier())
        dist.destroy_process_group()
    return fault


def test_two_hosts_that_wait_for_each_other(tmp_path: Path) -> None:
    with Job(both_receive, 4, str(tmp_path / "meeting"), group=False) as job:
        faults = job.results()
    waits = [
        rf"rank {a} \(pid \d+ on host{a // 2}\): recv\(float32 \[4\]\) from rank {b} \(tag 0, .*\) waits: 0 of 16 "
        rf"bytes moved, at .*test_over_hosts.py:\d+"
        for a, b in ((0, 3), (3, 0))
    ]
    for rank in (0, 3):
        faults[rank].says("DeadlockError", "these ranks wait for each other", *waits)
        assert faults[rank].seconds < 4.0
    assert faults[0].text == faults[3].text


def in_a_ring(rank: int, world_size: int, meeting: str) -> Fault:
    """Rank 0 is in a call of all, 1 receives from 2, 2 is in a call with 3, 3 receives from 0: two hosts, in turn."""
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, WAIT)
        pair = dist.new_group([2, 3])
        calls = {
            0: lambda: dist.send(torch.empty(1 << 22), 1),
            1: lambda: dist.recv(torch.empty(4), 2),
            2: lambda: dist.all_reduce(torch.ones(2), group=pair),
            3: lambda: dist.recv(torch.empty(4), 0),
        }
        fault = attempt(calls[rank])
        dist.destroy_process_group()
    return fault


def test_a_ring_over_messages_and_groups(tmp_path: Path) -> None:
    with Job(in_a_ring, 4, str(tmp_path / "meeting"), group=False) as job:
        faults = job.results()
    for fault in faults:
        fault.says("DeadlockError", *(rf"rank {rank} \(pid \d+ on host{rank // 2}\)" for rank in range(4)))
        assert fault.seconds < 6.0


def waits_for_the_last(rank: int, world_size: int, meeting: str, folder: str) -> Fault:
    os.environ["UNISONO_FLIGHT_DIR"] = folder
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, 3.0)
        dist.barrier()
        tell("ready")
        if rank == 3:
            time.sleep(4.0)
        fault = attempt(lambda: dist.all_reduce(torch.ones(8)))
        dist.destroy_process_group()
    return fault


def test_ps_and_flight_records_cover_all_hosts(tmp_path: Path) -> None:
    with Job(waits_for_the_last, 4, str(tmp_path / "meeting"), str(tmp_path / "record"), group=False) as job:
        job.hear("ready")
        time.sleep(1.5)
        pids = list(map(job.pid, range(4)))
        jobs = [with_other_hosts(each) for each in snapshot(pids[0])]
        faults = job.results()
    (seen,) = jobs
    assert [(rank.rank, rank.host, rank.pid) for rank in seen.ranks] == [
        (r, f"host{r // 2}", pids[r]) for r in range(4)
    ]
    assert [rank.waits_for[-1:] for rank in seen.ranks] == [(3,), (3,), (3,), ()]  # of host1 both, as seen from host0
    assert seen.ranks[3].state == "elsewhere"
    assert any(words.startswith("rank 3 keeps ranks 0-2 waiting for") for words in seen.remarks)
    faults[0].says("CollectiveTimeout", r"rank 3 \(pid \d+ on host1\) last completed call no. 1 barrier.*time.sleep")
    assert {file.name for file in (tmp_path / "record").iterdir()} == {f"flight_rank_{rank}" for rank in range(4)}


def comes_late(rank: int, world_size: int, meeting: str) -> list[float]:
    """Ranks wait for each other by turns for longer than a deadlock takes to be found; values that come."""
    found = []
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, WAIT)
        for late in (0, 3):
            if rank == late:
                time.sleep(1.5)
            x = torch.tensor([float(rank)])
            dist.all_reduce(x)
            found.append(x.item())
            y = torch.empty(1)
            if rank == late:
                time.sleep(1.0)
            works = [dist.isend(x + rank, 3 - rank), dist.irecv(y, 3 - rank)]
            for work in works:
                work.wait()
            found.append(y.item())
        dist.destroy_process_group()
    return found


def test_late_ranks_are_no_deadlock(tmp_path: Path) -> None:
    answers = ranks(4, group=False).run(comes_late, str(tmp_path / "meeting"))
    assert answers == [[6.0, 9.0 - rank] * 2 for rank in range(4)]


def measures(rank: int, world_size: int, meeting: str) -> int:
    """The offset of a clock that is 5 s ahead on the other host."""
    ahead = 5_000_000_000 * (rank // 2)
    clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + ahead)
    with on_hosts(rank, (2, 2)), patch.object(clocks, "time", clock), patch.object(clocks, "_best", (0, 0, 0)):
        init(meeting, rank, world_size, WAIT)
        time.sleep(1.0)
        found = clocks.offset()
        dist.destroy_process_group()
    return found


def test_clocks_of_hosts_are_compared(tmp_path: Path) -> None:
    first, second, *others = ranks(4, group=False).run(measures, str(tmp_path / "meeting"))
    assert (first, second) == (0, 0)
    assert all(abs(other + 5_000_000_000) < 20_000_000 for other in others)


@pytest.mark.soak
def test_no_call_of_many_is_taken_for_one(tmp_path: Path) -> None:
    assert ranks(4, group=False).run(many, str(tmp_path / "meeting"), timeout=120.0) == [""] * 4


def many(rank: int, world_size: int, meeting: str) -> str:
    """Calls that are late by chance on every rank, for a minute."""
    chance = torch.Generator().manual_seed(rank)
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, WAIT)
        end = time.monotonic() + 60

        def calls() -> None:
            going = torch.ones(1)
            while going.item():
                time.sleep(max(0.0, torch.rand(1, generator=chance).item() - 0.7))
                dist.broadcast(going.fill_(float(time.monotonic() < end)), 0)
                y = torch.empty(9)
                works = [dist.isend(torch.ones(9), (rank + 1) % 4), dist.irecv(y, (rank - 1) % 4)]
                for work in works:
                    work.wait()

        fault = attempt(calls)
        dist.destroy_process_group()
    return fault.text.removeprefix("None")
