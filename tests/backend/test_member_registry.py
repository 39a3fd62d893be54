"""The roll: whose announcement counts, in a job whose ranks were started one after another or again."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hangs.job import Job, tell
from unisono.backend.member_registry import MemberRegistry
from unisono.errors import UnisonoError, UsageError
from unisono.transport.host import Host
from unisono.transport.process import Identity


def roll(meeting: str, rank: int) -> MemberRegistry:
    return MemberRegistry(dist.FileStore(meeting, 2), "whole", "0", "the default group", [0, 1], rank, counted=False)


def announces(_: int, __: int, meeting: str) -> None:
    roll(meeting, 0)
    tell("ready")
    time.sleep(60)


def listens(_: int, __: int, meeting: str) -> list[str]:
    """What rank 1 hears of rank 0 at once, and within half a second."""
    mine, deadline = roll(meeting, 1), time.monotonic() + 0.5
    heard = [mine.gone(0).words]
    tell("ready")
    while not (words := mine.gone(0).words) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [*heard, words]


def test_a_rank_that_was_there_before_is_lost_once_it_was_seen(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    with Job(announces, 1, meeting, group=False) as first:
        first.hear("ready")
        time.sleep(0.03)  # a tick of the clock of start times, and more
        with Job(listens, 1, meeting, group=False) as second:
            second.hear("ready")
            os.kill(first.pid(0), signal.SIGKILL)
            before, after = second.result(0)
    assert not before
    assert "is dead" in after


def test_a_rank_that_had_died_before_may_come_again(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    with Job(announces, 1, meeting, group=False) as first:
        first.hear("ready")
        time.sleep(0.03)
    with Job(listens, 1, meeting, group=False) as second:
        assert second.result(0) == ["", ""]


def test_a_lack_of_something_is_told_to_the_peers(tmp_path: Path) -> None:
    mine = roll(str(tmp_path / "meeting"), 0)
    with pytest.raises(UnisonoError, match=r"rank 0 can not share the memory .*Too many open files"), mine.able():
        raise OSError(errno.EMFILE, "Too many open files")
    assert "can not share the memory of the default group" in mine.gone(0).words


def test_whoever_was_announced_last_reads_that_another_has_claimed_its_rank(tmp_path: Path) -> None:
    mine = roll(str(tmp_path / "meeting"), 0)
    mine.check_claim()
    mine.publish_claim(Identity.mine())  # the other one, which was announced before and came later to the memory
    with pytest.raises(UsageError, match="rank 0 of the default group is claimed twice"):
        mine.check_claim()


def test_an_error_from_elsewhere_is_no_lack(tmp_path: Path) -> None:
    mine = roll(str(tmp_path / "meeting"), 0)
    with pytest.raises(TimeoutError, match="a watchdog"), mine.able():
        raise TimeoutError("a watchdog")
    assert not mine.gone(0).words


def elsewhere(number: int) -> Any:
    return patch.object(Host, "mine", lambda: Host("boot", number, 1, 1))


def announces_elsewhere(_: int, __: int, meeting: str) -> bool:
    """Waits for rank 1, and returns whether it was found to be elsewhere."""
    with elsewhere(1):
        mine = roll(meeting, 0)
        tell("ready")
        return finds_others(mine, 60.0)


def finds_others(mine: MemberRegistry, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not mine.spans_hosts() and time.monotonic() < deadline:
        time.sleep(0.01)
    return mine.spans_hosts()


def listens_elsewhere(_: int, __: int, meeting: str, seconds: float) -> tuple[bool, list[str]]:
    """Whether rank 1 finds another host, and what it reads of rank 0."""
    with elsewhere(2):
        mine = roll(meeting, 1)
        tell("ready")
        return finds_others(mine, seconds), [mine.gone(0).words]


def test_a_container_of_an_earlier_attempt_is_no_other_host(tmp_path: Path) -> None:
    """Whether it has ended can not be seen from here: it counts once it says again that it is there."""
    meeting = str(tmp_path / "meeting")
    with Job(announces_elsewhere, 1, meeting, group=False) as first:
        first.hear("ready")
        time.sleep(0.03)
    with Job(listens_elsewhere, 1, meeting, 0.5, group=False) as second:
        assert second.result(0) == (False, [""])


def test_a_container_that_is_there_is_another_host(tmp_path: Path) -> None:
    """One kernel: a note counts if it was written after this process was started."""
    meeting = str(tmp_path / "meeting")
    with Job(listens_elsewhere, 1, meeting, 30.0, group=False) as second:
        second.hear("ready")
        with Job(announces_elsewhere, 1, meeting, group=False):
            assert second.result(0) == (True, [""])
