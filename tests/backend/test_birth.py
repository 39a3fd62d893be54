"""What is wrong before a first call is said in one line, on every rank, in seconds: versions, numbers, absent ranks."""

import logging
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, init
from ports import free_port
from unisono.backend import birth, member_registry, rendezvous_watch
from unisono.transport.host import Host


def logged() -> list[str]:
    """The lines that this process logs from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    return lines


def has_versions(rank: int, world_size: int, meeting: str, torchs: list[str]) -> Fault:
    with patch.object(birth, "versions", lambda: {"unisono": "1.2.0", "torch": torchs[rank]}):
        return attempt(lambda: init(meeting, rank, world_size, 20.0))


def test_versions_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    with Job(has_versions, 3, str(tmp_path / "meeting"), ["2.13.0", "2.11.0", "2.13.0"], group=False) as job:
        faults = job.results()
    line = (
        "the ranks of the default group run different versions of torch (ranks 0, 2: 2.13.0, rank 1: 2.11.0): "
        "pip install torch==2.13.0 everywhere"
    )
    assert [(fault.kind, fault.text) for fault in faults] == [("MismatchError", line)] * 3
    assert max(fault.seconds for fault in faults) < 10.0


class Memory(dict[str, bytes]):
    """A store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def test_ranks_of_one_machine_share_its_cores() -> None:
    """Numbered by host, or in turn: each rank finds those beside it, by the kernel that they run on."""
    store = Memory()
    for rank, boot in enumerate(["a", "b", "a", "a", "b"]):
        with patch.object(Host, "mine", lambda boot=boot: Host(boot, rank, 0, 0)):  # noqa: B023
            birth.publish_self(store, rank)
    born = birth.births(store, range(5), "g")
    assert [birth.ranks_here(born, rank) for rank in (0, 1)] == [[0, 2, 3], [1, 4]]


def test_a_build_is_no_version() -> None:
    with patch.object(birth, "version", lambda package: "2.13.0+cu126"):
        assert birth.versions() == {"unisono": "2.13.0", "torch": "2.13.0"}


def is_rank(rank: int, world_size: int, meeting: str, numbers: list[int]) -> Fault:
    return attempt(lambda: init(meeting, numbers[rank], 3, 4.0))


@pytest.mark.parametrize("numbers", [[0, 0, 1], [0, 1, 1]])
def test_a_number_that_is_given_twice(numbers: list[int], tmp_path: Path) -> None:
    """Rank 2 is missing, so that all would wait for it."""
    with Job(is_rank, 3, str(tmp_path / "meeting"), numbers, group=False) as job:
        faults, pids = job.results(), [job.pid(k) for k in range(3)]
    twice = max(numbers, key=numbers.count)
    claimants = [str(pid) for pid, number in zip(pids, numbers, strict=True) if number == twice]
    for fault, number in zip(faults, numbers, strict=True):
        if number != twice:
            assert fault.kind in ("CollectiveTimeout", "PeerLostError")  # by whether the claimants have ended by then
            continue
        by = re.search(
            rf"^rank {twice} of the default group is claimed twice: by pid (\d+) .*and by pid (\d+)", fault.text
        )
        assert fault.kind == "UsageError"
        assert by is not None
        assert sorted(by.groups()) == sorted(claimants)
        assert fault.seconds < 3.5


def waits(rank: int, world_size: int, meeting: str) -> tuple[Fault, list[str]]:
    lines = logged()
    with patch.object(member_registry, "ABSENT_SECONDS", 0.5):
        return attempt(lambda: init(meeting, rank, world_size + 1, 2.0)), lines


def test_ranks_that_do_not_come_are_named_long_before_the_timeout(tmp_path: Path) -> None:
    with Job(waits, 2, str(tmp_path / "meeting"), group=False) as job:
        for rank, (fault, lines) in enumerate(job.results()):
            fault.says("CollectiveTimeout", "rank 2 did not join")
            assert len(lines) == 1
            assert f"rank {rank} of 3 (pid " in lines[0]
            assert ": rank 2 did not come within 0.5 s: start them" in lines[0]


def reaches_nobody(rank: int, world_size: int, port: int) -> list[str]:
    lines = logged()
    variables = {"RANK": f"{rank + 1}", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    with patch.dict(os.environ, variables), patch.object(rendezvous_watch, "ABSENT_SECONDS", 1.0):
        for backend in ("gloo", "unisono"):
            attempt(lambda backend=backend: dist.init_process_group(backend, timeout=timedelta(seconds=2)))
    return lines


def test_an_address_that_nobody_answers() -> None:
    """The program may end before its timeout: the line comes while it waits, for groups of unisono alone."""
    with socket.create_server(("localhost", 0)) as door:
        port = door.getsockname()[1]
    with Job(reaches_nobody, 2, port, group=False) as job:
        for rank, lines in enumerate(job.results()):
            assert len(lines) == 1
            assert f"rank {rank + 1} of 3 (pid " in lines[0]
            assert (
                f"can not reach rank 0's store at MASTER_ADDR localhost, port {port} (connection refused)" in lines[0]
            )


def meets(rank: int, world_size: int, port: int, longer: int) -> tuple[list[str], Fault]:
    """Rank 2 is missing: rank 0 waits in torch's rendezvous, rank 1 for its memory, ``longer`` or not."""
    lines = logged()
    variables = {"RANK": f"{rank}", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    quick = patch.object(rendezvous_watch, "ABSENT_SECONDS", 1.0), patch.object(member_registry, "ABSENT_SECONDS", 1.0)
    with patch.dict(os.environ, variables), quick[0], quick[1]:
        fault = attempt(lambda: dist.init_process_group("unisono", timeout=timedelta(seconds=3 + rank * longer)))
    return lines, fault


@pytest.mark.parametrize("longer", [-1, 3])
def test_a_rank_that_waits_in_torchs_rendezvous_is_not_missing(longer: int) -> None:
    with socket.create_server(("localhost", 0)) as door:
        port = door.getsockname()[1]
    with Job(meets, 2, port, longer, group=False) as job:
        (first, served), (second, lost) = job.results()
    assert len(first) == len(second) == 1, (first, second)
    assert ": rank 2 did not come to rank 0's store at MASTER_ADDR localhost" in first[0]
    assert ": rank 2 did not come within 1 s" in second[0]
    served.says("DistStoreError", r"clients joined\. rank 2 did not come to rank 0's store at MASTER_ADDR localhost")
    if longer > 0:
        lost.says("PeerLostError", "the job's store does not answer .* which has left while rank 2 had not come;")
    else:
        lost.says("CollectiveTimeout", "found no shared memory within its timeout: rank 2 did not join")


def has_no_folder(rank: int, world_size: int, folder: Path) -> tuple[Fault, list[str]]:
    """In vain; then the folder comes once a line has come."""
    lines = logged()

    def meet(seconds: float) -> None:
        dist.init_process_group(
            "unisono", f"file://{folder}/meeting", timedelta(seconds=seconds), world_size=world_size, rank=rank
        )

    def make() -> None:
        while not lines:
            time.sleep(0.01)
        folder.mkdir()

    in_vain = attempt(lambda: meet(0.1))
    threading.Thread(target=make, daemon=True).start()
    with patch.object(rendezvous_watch, "ABSENT_SECONDS", 0.2):
        meet(20.0)
    return in_vain, lines


def test_a_meeting_in_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    """torch's FileStore would wait for it for minutes, without a word."""
    folder = tmp_path / "folder"
    with Job(has_no_folder, 1, folder, group=False) as job:
        ((in_vain, lines),) = job.results()
    missing = f"^{folder}, the folder of init_method file://{folder}/meeting, does not exist on .*: "
    in_vain.says("CollectiveTimeout", f"{missing}it did not come within 0.1 s")
    assert len(lines) == 1
    assert re.match(f"{missing}make it, where all ranks see it", lines[0])


def has_world_size(rank: int, _: int, port: int) -> None:
    """Joins as rank 0 of 2 and as rank 1 of 3, and ends at once when that fails."""
    meeting, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=20)
    fault = attempt(
        lambda: dist.init_process_group("unisono", init_method=meeting, rank=rank, world_size=2 + rank, timeout=limit)
    )
    print(fault.kind, fault.text, file=sys.stderr, flush=True)
    os._exit(0)


def test_the_first_rank_ends_with_its_store_once_the_others_have_read_why() -> None:
    with Job(has_world_size, 2, free_port(), group=False) as job:
        job.results()
        first, second = (job.errors(rank).splitlines() for rank in range(2))
    numbers = r"rank 0 \(.*\) was started with world_size 2, .*rank 1 \(.*\) with 3|rank 1 .* 3, rank 0 .* 2"
    for lines in first, second:
        assert len(lines) == 1, lines
        assert re.match(f"MismatchError ({numbers}): give all ranks the same", lines[0]), lines


@pytest.mark.parametrize("left", [False, True])
def test_the_first_rank_waits_until_all_have_read(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock, seen = dist.HashStore(), [0.0], []
    monkeypatch.setattr(birth.time, "monotonic", lambda: clock[0])

    def sleep(_: float) -> None:
        clock[0] += 1.5
        seen.append(store.add("birth/read/n", 1))

    monkeypatch.setattr(birth.time, "sleep", sleep)
    birth.local_store(store, 3, 4, "n", "", None, lambda: left)
    birth.local_store(store, 0, 4, "n", "", None, lambda: left)
    assert seen == ([3] if left else [3, 4])  # of ranks that read while this one waits
