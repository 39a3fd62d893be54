"""Groups over several hosts, on one machine: what tells hosts apart is replaced in the ranks, or is real namespaces.

What hosts and links do to a job is in tests/hosts. Sums are compared bit for bit with those of a loop in rank order.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import unisono
from hangs.job import Fault, Job, attempt, end_with_parent, init, tell
from ranks import ranks
from unisono.transport.host import Host

PR_SET_DUMPABLE = 4
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
BOOT_ID = "unisono.transport.host._boot_id"


@contextmanager
def on_hosts(rank: int, sizes: Sequence[int]) -> Iterator[None]:
    """This rank is on one of so many hosts, of so many ranks each, rank by rank."""
    host = next(h for h in range(len(sizes)) if rank < sum(sizes[: h + 1]))
    with patch(BOOT_ID, lambda: f"boot-{host}"), patch.object(socket, "gethostname", lambda: f"host{host}"):
        yield


def given(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: numbers whose sum depends on its order."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul_(10).to(dtype)


def in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum as it is written down: one part after the other, half precision in float32, rounded once."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def sums(rank: int, size: int, numel: int, dtype: torch.dtype) -> list[str]:
    """The sums of this size that differ from those in rank order."""
    parts = [given(each, numel * size, dtype) for each in range(size)]
    want = in_rank_order(parts)
    whole, to_last = parts[rank].clone(), parts[rank].clone()
    dist.all_reduce(whole)
    dist.reduce(to_last, size - 1)
    mine = torch.empty(numel, dtype=dtype)
    dist.reduce_scatter(mine, list(parts[rank].view(size, numel)))
    found = {"all_reduce": torch.equal(whole, want), "reduce": rank != size - 1 or torch.equal(to_last, want)}
    found["reduce_scatter"] = torch.equal(mine, want[rank * numel : (rank + 1) * numel])
    return [f"{name} of {numel} {dtype}" for name, right in found.items() if not right]


def moved(rank: int, size: int, numel: int) -> list[str]:
    """What of this size does not arrive as it was sent; uneven pieces too."""
    mine = given(rank, numel, torch.float32)
    every = [given(each, numel + each, torch.float32) for each in range(size)]
    gathered = [torch.empty(numel + each) for each in range(size)]
    dist.all_gather(gathered, every[rank])
    whole = mine.clone()
    dist.broadcast(whole, size - 1)
    exchanged = [torch.empty(numel) for _ in range(size)]
    dist.all_to_all(exchanged, [mine + each for each in range(size)])
    out = torch.empty(numel)
    dist.scatter(out, [mine + each for each in range(size)] if rank == 1 else None, 1)
    at_root = [torch.empty(numel) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, at_root, 0)
    came, work = torch.empty(numel), dist.isend(mine, (rank + size // 2) % size)
    dist.recv(came, (rank - size // 2) % size)
    work.wait()
    there = [given(each, numel, torch.float32) for each in range(size)]
    found = {
        "all_gather": all(map(torch.equal, gathered, every)),
        "broadcast": torch.equal(whole, there[size - 1]),
        "all_to_all": all(torch.equal(each, t + rank) for each, t in zip(exchanged, there, strict=True)),
        "scatter": torch.equal(out, there[1] + rank),
        "gather": at_root is None or all(map(torch.equal, at_root, there)),
        "messages": torch.equal(came, there[(rank - size // 2) % size]),
    }
    return [f"{name} of {numel}" for name, right in found.items() if not right]


def everything(rank: int, world_size: int, meeting: str, sizes: Sequence[int]) -> list[str]:
    """All that is wrong in a group over hosts, and in a group of its first and its last rank."""
    with on_hosts(rank, sizes):
        init(meeting, rank, world_size)
        ends = dist.new_group([0, world_size - 1])
        wrong = []
        for numel in (0, 1, 700, 100_000):
            wrong += moved(rank, world_size, numel)
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                wrong += sums(rank, world_size, numel, dtype)
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        if objects != [{"rank": each} for each in range(world_size)]:
            wrong.append("objects")
        if rank in (0, world_size - 1):
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=ends)
            wrong += [] if x.item() == world_size - 1 else ["the ends"]
        dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 1, 2)])
def test_every_collective_over_hosts(sizes: tuple[int, ...], tmp_path: Path) -> None:
    assert ranks(4, group=False).run(everything, str(tmp_path / "meeting"), sizes) == [[]] * 4


def by_name(rank: int, world_size: int, meeting: str) -> list[str]:
    """The algorithms that give a wrong sum over hosts."""
    wrong = []
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size)
        for name in (
            "ring",
            "two_phase",
            "recursive_doubling",
            "double_tree",
            "leaders",
            "columns",
            "prefix",
            "hierarchical",
        ):
            x = torch.arange(5000.0) + rank
            with unisono.algorithm(name):
                dist.all_reduce(x)
            wrong += [] if torch.equal(x, 4 * torch.arange(5000.0) + 6) else [name]
        dist.destroy_process_group()
    return wrong


def test_named_algorithms_run_over_hosts(tmp_path: Path) -> None:
    assert ranks(4, group=False).run(by_name, str(tmp_path / "meeting")) == [[]] * 4


def members_only(rank: int, world_size: int, meeting: str) -> Fault:
    """The first two ranks make a group of their own that the others do not make; then all make one."""
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, 25.0)
        if rank < 2:
            dist.barrier(dist.new_group([0, 1]))
        found = attempt(lambda: dist.barrier(dist.new_group(timeout=timedelta(seconds=25))))
        dist.destroy_process_group()
    return found


def test_groups_that_are_not_made_alike_are_refused_on_all_hosts(tmp_path: Path) -> None:
    found = ranks(4, group=False).run(members_only, str(tmp_path / "meeting"))
    assert "MismatchError" in [fault.kind for fault in found[2:]]
    for fault in found:  # those that come late find the reason of another one
        fault.says(fault.kind, "new_group was not called alike on all ranks")
        assert fault.kind in ("MismatchError", "PeerLostError")
        assert fault.seconds < 10.0


def disagrees(rank: int, world_size: int, meeting: str) -> tuple[Fault, float, Fault]:
    """The last rank, on another host, has another shape; the group goes on; a message is larger than its receive."""
    with on_hosts(rank, (2, 1)):
        init(meeting, rank, world_size, 20.0)
        differs = attempt(lambda: dist.all_reduce(torch.ones(2, 3) if rank < 2 else torch.ones(3, 2)))
        x = torch.ones(1)
        dist.all_reduce(x)
        ends = {0: lambda: dist.send(torch.ones(8), 2), 2: lambda: dist.recv(torch.ones(4), 0)}
        larger = attempt(ends.get(rank, lambda: None))
        attempt(dist.barrier)
        dist.destroy_process_group()
    return differs, x.item(), larger


def test_mismatches_over_hosts(tmp_path: Path) -> None:
    answers = ranks(3, group=False).run(disagrees, str(tmp_path / "meeting"))
    for differs, total, _ in answers:
        words = [rf"rank {rank}: all_reduce\(float32 \[2, 3\], SUM\)" for rank in (0, 1)]
        differs.says("MismatchError", *words, r"-> rank 2: all_reduce\(float32 \[3, 2\], SUM\)", "can still be used")
        assert total == 3.0
    answers[2][2].says("MismatchError", "4 elements.* from rank 0, which sent 8 elements")


def loops(rank: int, world_size: int, meeting: str) -> Fault:
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, 30.0)
        dist.barrier()
        tell("ready")
        return attempt(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10**7)])


def test_a_killed_rank_is_named_on_every_host(tmp_path: Path) -> None:
    with Job(loops, 4, str(tmp_path / "meeting"), group=False) as job:
        job.hear("ready")
        job.signal(3, signal.SIGKILL)
        *answers, _ = job.results()
    for fault in answers:
        fault.says("PeerLostError", r"rank 3 \(pid \d+ on host1\) is (dead|lost)")


def meets_others(rank: int, world_size: int, meeting: str, differs: int) -> float:
    """Ranks whose hosts differ in one field, rank 0's from the others'."""
    fields: list[Any] = ["boot", 1, 1, 1]
    fields[differs] = 2 + (rank > 0)
    with patch.object(Host, "mine", lambda: Host(*fields)):
        init(meeting, rank, world_size, 20.0)
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        dist.destroy_process_group()
    return x.item()


@pytest.mark.parametrize("differs", [1, 2, 3])
def test_containers_and_users_are_hosts_of_their_own(differs: int, tmp_path: Path) -> None:
    assert ranks(3, group=False).run(meets_others, str(tmp_path / "meeting"), differs) == [3.0] * 3


def beside_gloo(rank: int, world_size: int, meeting: str) -> list[float]:
    """Groups of unisono in a default group of Gloo, one on each host and one over both."""
    with on_hosts(rank, (2, 2)):
        init(meeting, rank, world_size, 20.0, "gloo")
        inside = [dist.new_group([first, first + 1], backend="unisono") for first in (0, 2)][rank // 2]
        across = dist.new_group([1, 2], backend="unisono")
        x, y = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        dist.all_reduce(x, group=inside)
        if rank in (1, 2):
            dist.all_reduce(y, group=across)
        dist.barrier()
        dist.destroy_process_group()
    return [x.item(), y.item()]


def test_groups_beside_one_of_gloo(tmp_path: Path) -> None:
    answers = ranks(4, group=False).run(beside_gloo, str(tmp_path / "meeting"))
    assert answers == [[1.0, 0.0], [1.0, 3.0], [5.0, 3.0], [5.0, 3.0]]


def enter_namespace() -> None:
    """From here on this is process 1 of a PID namespace, and sees that one in /proc; its parent waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWPID | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    end_with_parent()
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0


def in_namespaces(rank: int, world_size: int, meeting: str) -> tuple[int, list[float]]:
    """All ranks but the first are in PID namespaces of their own."""
    if rank:
        enter_namespace()
    init(meeting, rank, world_size)
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return os.getpid(), x.tolist()


def test_real_pid_namespaces(tmp_path: Path) -> None:
    """Two ranks have the same pid, 1, and a third sees them by other numbers."""
    probe = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("may not make a PID namespace")
    with Job(in_namespaces, 3, str(tmp_path / "meeting"), group=False) as job:
        results = job.results()
    assert [sums for _, sums in results] == [[3.0] * 3] * 3
    assert [pid == 1 for pid, _ in results] == [False, True, True]


def is_not_dumpable(rank: int, world_size: int, meeting: str) -> Fault:
    """Rank 0 may not be looked into, except by root; so nobody is root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, rank)
    return attempt(lambda: init(meeting, rank, world_size, 20.0))


def test_a_process_that_is_not_dumpable() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        with Job(is_not_dumpable, 3, f"{folder}/meeting", group=False) as job:
            told = job.results()
    words = r"may not open the shared memory of rank 0 \(pid \d+\): it is not dumpable \(prctl PR_SET_DUMPABLE 0"
    told[0].says("PeerLostError", rf"rank [12] \(pid \d+ on \S+\) {words}")
    assert told[0].seconds < 5.0
    for rank in (1, 2):
        assert re.search(words, told[rank].text), told[rank]
        assert told[rank].seconds < 5.0
