"""The guard of messages on GPUs, which needs no GPU: both ends in shared memory, compared without a wait."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backend.test_hosts import on_hosts
from hangs.job import Fault, Job, attempt, init
from ranks import ranks
from unisono.errors import CollectiveTimeout, MismatchError, UnisonoError
from unisono.watch.message_guard import MessageGuard


def guard() -> MessageGuard:
    """The guard of the default group, which counts on from one test to the next, so a group is for one of them."""
    ours: Any = dist.group.WORLD
    found: MessageGuard = ours._group.device_guard.messages
    return found


def words_of(do: Callable[[], object]) -> str:
    try:
        do()
    except UnisonoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def equal(rank: int, world_size: int) -> str:
    """Both ways, one far ahead of the other by turns; then nothing is missing."""
    here, peer = guard(), (rank + 1) % world_size
    other = (rank - 1) % world_size
    for k in range(100):
        for op, who in (("send", peer), ("recv", other)) if k % 2 else (("recv", other), ("send", peer)):
            here.issued(op, who, k % 3 - 1, 4 + k % 5, torch.float32)
        time.sleep(0.002 * (k % 40 == rank))
    dist.barrier()
    here.compare()
    here.check(0.0)
    return words_of(lambda: here.check(0.0))


def differing(rank: int, world_size: int, first: int, facts: tuple[int, int, torch.dtype]) -> str:
    """Rank 0 sends 4 floats, rank 1 expects ``facts``; rank ``first`` issues first."""
    here = guard()
    for k in range(2):
        here.issued("recv" if rank else "send", 1 - rank, k, 3, torch.float32)
    dist.barrier()
    mine = facts if rank else (0, 4, torch.float32)
    found = ""
    for turn in range(2):
        if (turn == 0) == (rank == first):
            found = words_of(lambda: here.issued("recv" if rank else "send", 1 - rank, *mine))
        dist.barrier()
    return found or words_of(lambda: here.check(10.0))


def left_out(rank: int, world_size: int) -> str:
    """Rank 1 leaves out a receive, and comes later than rank 0: what differed is gone, its checksum is not."""
    here, tags = guard(), [k % 7 for k in range(100)]
    for tag in tags if rank == 0 else ():
        here.issued("send", 1, tag, 4, torch.float32)
    dist.barrier()
    del tags[30]
    found = words_of(lambda: [here.issued("recv", 0, tag, 4, torch.float32) for tag in tags]) if rank else ""
    dist.barrier()
    return found or words_of(lambda: here.check(10.0))


def waiting(rank: int, world_size: int) -> str:
    """Rank 1 never receives."""
    here = guard()
    if rank == 0:
        here.issued("send", 1, 0, 4, torch.float32)
        time.sleep(0.05)
    found = words_of(lambda: here.check(0.01))
    dist.barrier()
    return found


def on_a_new_group(n: int, fn: Any, *args: Any) -> list[str]:
    ranks(n, group=False).run(between)
    return ranks(n).run(fn, *args)


def between(rank: int, world_size: int) -> None:
    """Ends the group that was."""


def test_equal_messages_pass() -> None:
    assert on_a_new_group(3, equal) == [""] * 3


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("facts", "expected"),
    [((0, 5, torch.float32), "5 elements of float32 (tag 0)"), ((0, 4, torch.int32), "4 elements of int32 (tag 0)"),
     ((-2, 4, torch.float32), "4 elements of float32 (tag -2)")],
)  # fmt: skip
def test_messages_that_differ_are_raised_on_both(first: int, facts: Any, expected: str) -> None:
    for words in on_a_new_group(2, differing, first, facts):
        assert words.startswith(
            f"{MismatchError.__name__}: message no. 3 from rank 0 to rank 1 of the default group on GPUs: rank 0 sends "
            f"4 elements of float32 (tag 0), rank 1 expects {expected}."
        )


def test_a_message_left_out_long_ago_is_found() -> None:
    found = on_a_new_group(2, left_out)
    assert all("MismatchError: message no. " in words for words in found)


def test_a_message_that_nobody_receives_is_named() -> None:
    found = on_a_new_group(2, waiting)
    assert found[0].startswith(
        f"{CollectiveTimeout.__name__}: send no. 1 to rank 1 of the default group on GPUs did not"
    )
    assert "rank 1 has made no such recv" in found[0]
    assert found[1] == ""


def test_a_lost_sender_is_named() -> None:
    with Job(loses_its_sender, 2) as job:
        fault, _ = job.results()
    fault.says("PeerLostError", r"recv no. 2 from rank 1 of the default group on GPUs can not end", r"rank 1 \(pid \d+")


def loses_its_sender(rank: int, world_size: int) -> Fault:
    here = guard()
    here.issued("send" if rank else "recv", 1 - rank, 0, 4, torch.float32)
    dist.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    here.issued("recv", 1, 0, 4, torch.float32)
    found = attempt(lambda: None)
    while not found.kind:
        time.sleep(0.05)
        found = attempt(lambda: here.check(20.0))
    return found


def until(found: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for what comes from another host."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def over_hosts(rank: int, world_size: int, meeting: str) -> tuple[str, str, str]:
    """Three ranks on two hosts: equal messages in a ring; one that rank 2, alone on its host, is late for; one that
    differs there. What each has found of them.
    """
    with on_hosts(rank, (2, 1)):
        init(meeting, rank, world_size)
        here, after, before = guard(), (rank + 1) % 3, (rank - 1) % 3
        for k in range(40):
            here.issued("send", after, k, 4 + k % 5, torch.float32)
            here.issued("recv", before, k, 4 + k % 5, torch.float32)
        until(lambda: not words_of(lambda: here.check(0.0)))
        dist.barrier()
        here.issued("send", 2, 0, 4, torch.float32) if rank == 1 else None
        time.sleep(0.1)
        late = words_of(lambda: here.check(0.05))
        dist.barrier()
        here.issued("recv", 1, 0, 4, torch.float32) if rank == 2 else None
        until(lambda: not words_of(lambda: here.check(0.0)))
        dist.barrier()
        differing = ""
        if rank != 1:
            mine = ("recv", 0, 7, 5) if rank else ("send", 2, 7, 4)
            words_of(lambda: here.issued(*mine, torch.float32))  # raises where the other end has come already
            until(lambda: "MismatchError" in words_of(lambda: here.check(10.0)))
            differing = words_of(here.compare)
        dist.barrier()
        quiet = words_of(lambda: here.check(0.0)) if rank == 1 else ""
        dist.destroy_process_group()
    return late, differing, quiet


def test_messages_between_hosts_are_compared(tmp_path: Path) -> None:
    found = ranks(3, group=False).run(over_hosts, str(tmp_path / "meeting"))
    assert [late[:80] for late, _, _ in found] == [
        "", "CollectiveTimeout: send no. 41 to rank 2 of the default group on GPUs did not en", "",
    ]  # fmt: skip
    for rank in (0, 2):
        assert found[rank][1].startswith(
            "MismatchError: message no. 1 from rank 0 to rank 2 of the default group on GPUs: rank 0 sends 4 elements "
            "of float32 (tag 7), rank 2 expects 5 elements of float32 (tag 7)."
        )
    assert found[1][1:] == ("", "")
