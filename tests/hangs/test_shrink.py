"""`unisono.shrink`: the ranks that live go on in a new group; who lives and does not come is named."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from backend.test_hosts import on_hosts
from hangs.job import Fault, Job, attempt, init, tell
from ranks import ranks
from unisono.backend.survivors import Survivors
from unisono.transport import handshake

HOST = os.uname().nodename


def total(group: Any = None) -> list[float]:
    """This rank, the size of its group and a sum in it, of 1 per rank."""
    x = torch.ones(5000)
    dist.all_reduce(x, group=group)
    return [dist.get_rank(group), dist.get_world_size(group), x[-1].item()]


def open_files() -> list[str]:
    gc.collect()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link)]


def over_tcp(rank: int, world_size: int, folder: str) -> None:
    """Joins a default group whose store lives in rank 0."""
    limit, note = timedelta(seconds=30), Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        note.with_suffix(".new").write_text(str(store.port))
        note.with_suffix(".new").rename(note)
    else:
        while not note.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(note.read_text()), None, False, limit, wait_for_workers=False)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=world_size, timeout=limit)


def goes_on(rank: int, world_size: int, folder: str, victims: list[int]) -> list[Any]:
    """Ranks are killed one after the other; the others go on, with calls of all kinds under way."""
    before = open_files()
    over_tcp(rank, world_size, folder)
    found = [loses(rank, victim) for victim in victims]
    dist.destroy_process_group()
    left = [name for name in open_files() if name not in before and not name.startswith("pipe:")]
    return [found, left, threading.active_count()]  # libuv, of the store, makes a pipe once per process


def loses(rank: int, victim: int) -> list[Any]:
    total()
    tell(f"ready for {victim}")
    if rank == victim:
        time.sleep(60)
    message = dist.irecv(torch.zeros(3), (dist.get_rank() + 1) % dist.get_world_size())
    work = dist.all_reduce(torch.ones(4), async_op=True)
    fault = attempt(lambda: [dist.all_reduce(torch.ones(4)) for _ in range(10**7)])
    began = time.monotonic()
    group = unisono.shrink()
    seconds = time.monotonic() - began
    ends = [attempt(each.wait).kind for each in (work, message)]
    return [fault.kind, seconds < 2.0 + os.getloadavg()[0], group is dist.group.WORLD, *ends, *total()]


def test_ranks_that_live_go_on_without_the_store(tmp_path: Path) -> None:
    with Job(goes_on, 4, str(tmp_path), [2, 0], group=False) as job:
        for victim, others in ((2, (0, 1, 2, 3)), (0, (0, 1, 3))):
            job.hear(f"ready for {victim}", others)
            time.sleep(0.1)
            job.signal(victim, signal.SIGKILL)
        results = job.results(40)
    lost = ["PeerLostError", True, True, "PeerLostError"]
    for rank, places in {1: (1, 0), 3: (2, 1)}.items():
        rows, left, threads = results[rank]
        assert (left, threads) == ([], 1)
        for row, place, size in zip(rows, places, (3, 2), strict=True):
            assert row[:3] == lost[:3]
            assert row[3] == "PeerLostError"
            assert row[4]  # a receive from a rank that lives ends, too
            assert row[5:] == [place, size, float(size)]


STAGES = {"proposed": "_wait_for", "joining": "_try", "joined": "_confirmed"}


def dies_in_it(rank: int, world_size: int, deaths: list[tuple[int, str]]) -> list[Any]:
    """In each call of shrink a rank kills itself; the others call it again if they have come out with a dead rank."""
    found = []
    for victim, stage in deaths:
        total()
        if dist.get_rank() == victim:
            setattr(Survivors, STAGES[stage], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        again = 0
        while True:
            unisono.shrink()
            fault = attempt(total)
            if fault.kind != "PeerLostError":
                break
            again += 1
        found.append([again <= 1, fault.text])
    return found


def test_a_rank_dies_in_the_shrink() -> None:
    with Job(dies_in_it, 5, [(1, "proposed"), (0, "joining"), (2, "joined")]) as job:
        results = job.results(60, killed=[0, 1, 4])
    texts = {2: ["[1, 4, 4.0]", "[0, 3, 3.0]", "[0, 2, 2.0]"], 3: ["[2, 4, 4.0]", "[1, 3, 3.0]", "[1, 2, 2.0]"]}
    for rank, lines in texts.items():
        assert results[rank] == [[True, line] for line in lines]


def dies_as_hosts_connect(rank: int, world_size: int, meeting: str, victims: list[int]) -> list[Any]:
    """In each call of shrink a rank kills itself as it is about to be connected; the others wait for it in Gloo."""
    found: list[Any] = []
    with on_hosts(rank, (3, 2)):
        init(meeting, rank, world_size)
        for victim in victims:
            total()
            if dist.get_rank() == victim:
                handshake._Attempt._run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            began = time.monotonic()
            unisono.shrink()
            found.append([time.monotonic() - began < 2.0 + os.getloadavg()[0], *total()])
    return found


def test_a_rank_dies_as_hosts_connect_anew(tmp_path: Path) -> None:
    """One of the other host; then that which serves the new store."""
    with Job(dies_as_hosts_connect, 5, f"{tmp_path}/meeting", [3, 0], group=False) as job:
        results = job.results(60, killed=[0, 3])
    assert results[1] == [[True, 1, 4, 4.0], [True, 0, 3, 3.0]]
    assert results[4] == [[True, 3, 4, 4.0], [True, 2, 3, 3.0]]


def late(rank: int, world_size: int, meeting: str) -> list[Any]:
    """Rank 2 comes to a later call; then it is stopped, left out, and goes on."""
    init(meeting, rank, world_size)
    dist.barrier()
    tell("ready")
    short, found = timedelta(seconds=0.7), []
    if rank == 2:
        found.append(attempt(lambda: dist.all_reduce(torch.ones(3))))
        time.sleep(1.5)
    else:
        found.append(attempt(lambda: unisono.shrink(timeout=short)))
    unisono.shrink()
    found.append(attempt(total))
    tell("all")
    if rank == 2:
        while not Path(meeting).with_name("left out").exists():
            time.sleep(0.01)
        return [*found, attempt(unisono.shrink)]
    while not Path(meeting).with_name("stopped").exists():
        time.sleep(0.01)
    found.append(attempt(unisono.shrink))
    tell("named")
    while not Path(meeting).with_name("named").exists():  # who leaves it out first is heard by who still waits for it
        time.sleep(0.01)
    found.append(attempt(lambda: unisono.shrink(ranks_to_exclude=[2] if rank else [])))
    found.append(attempt(total))
    tell("left out")
    return found


def test_a_rank_that_lives_is_not_left_out_silently(tmp_path: Path) -> None:
    with Job(late, 3, str(tmp_path / "meeting"), group=False) as job:
        job.hear("all")
        job.signal(2, signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        job.hear("named", (0, 1))
        (tmp_path / "named").touch()
        job.hear("left out", (0, 1))
        (tmp_path / "left out").touch()
        job.signal(2, signal.SIGCONT)
        results = job.results(40)
        pid = job.pid(2)
    for rank in (0, 1):
        slow, whole, stopped, smaller, after = results[rank]
        here = rf"rank 2 \(pid {pid} on {HOST}\)"
        slow.says(
            "CollectiveTimeout", r"shrink\(the default group\)", r"0\.7 s: rank 2 lives", here, r"time\.sleep\(1\.5"
        )
        stopped.says("CollectiveTimeout", "in vain.*rank 2 lives", r"ranks_to_exclude=\[2\]", f"{here}.*it is stopped")
        assert whole.text == f"[{rank}, 3, 3.0]"
        assert smaller.kind == ""
        assert after.text == f"[{rank}, 2, 2.0]"
    interrupted, whole, out = results[2]
    interrupted.says("PeerLostError", "has called unisono.shrink")
    assert whole.text == "[2, 3, 3.0]"
    out.says("PeerLostError", "rank 2 has been left out of the new group", "ranks_to_exclude")


def subgroups(rank: int, world_size: int) -> Any:
    """Rank 1 is killed: a subgroup goes on alone, then the default group takes all of them with it."""
    first, second, unused = (dist.new_group(members) for members in ([0, 1, 3], [0, 2], [1, 2, 3]))
    dist.barrier()
    if rank in (0, 2):
        dist.barrier(second)
    tell("ready")
    if rank == 1:
        time.sleep(60)
    found: list[Any] = []
    if rank != 2:
        found.append(attempt(lambda: dist.all_reduce(torch.ones(3), group=first)).kind)
        group = unisono.shrink(first)
        found += [total(group), dist.get_process_group_ranks(group), dist.get_world_size()]
        found.append(attempt(lambda: total(first)).kind != "")
    else:
        found.append(attempt(lambda: dist.barrier(unused)).kind)
    few = attempt(lambda: unisono.shrink(min_size=4))
    assert "3 of 4 ranks are left, min_size is 4" in few.text
    unisono.shrink(min_size=3)
    fresh = dist.new_group([0, 2])
    found.append(total())
    return [*found, total(fresh)] if dist.get_rank() != 1 else [*found, attempt(lambda: total(second)).kind != ""]


def test_subgroups() -> None:
    with Job(subgroups, 4) as job:
        job.hear("ready")
        job.signal(1, signal.SIGKILL)
        first, _, third, fourth = job.results(40, killed=[1])
    assert first == ["PeerLostError", [0, 2, 2.0], [0, 3], 4, True, [0, 3, 3.0], [0, 2, 2.0]]
    assert third == ["PeerLostError", [1, 3, 3.0], True]
    assert fourth == ["PeerLostError", [1, 2, 2.0], [0, 3], 4, True, [2, 3, 3.0], [1, 2, 2.0]]


def mistakes(rank: int, world_size: int) -> list[Fault]:
    gloo = dist.new_group([0, 1], backend="gloo")
    calls: list[Callable[[], Any]] = [
        lambda: unisono.shrink(gloo),
        lambda: unisono.shrink(ranks_to_exclude=[5]),
        lambda: unisono.shrink(ranks_to_exclude=[rank]),
        lambda: unisono.shrink(timeout=timedelta(seconds=0)),
    ]
    found = [attempt(call) for call in calls]
    dist.destroy_process_group(gloo)
    assert total() == [rank, 2, 2.0]
    unisono.shrink()  # of a group that has lost nobody: all of them again
    return [*found, attempt(total)]


def test_mistakes() -> None:
    for rank, (other, outside, itself, at_once, after) in enumerate(ranks(2).run(mistakes)):
        other.says("UsageError", "no group of unisono")
        outside.says("UsageError", "0 to 1")
        itself.says("UsageError", f"rank {rank} leaves itself out")
        at_once.says("UsageError", "more than 0 s")
        assert after.text == f"[{rank}, 2, 2.0]"


def test_no_group() -> None:
    with pytest.raises(unisono.UsageError, match="no default group"):
        unisono.shrink()
