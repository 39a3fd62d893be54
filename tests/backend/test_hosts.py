"""Several hosts: no group may span them, one per host may stand beside a group of Gloo. Rank 2 and up play the second.

What tells machines apart is the boot id of the kernel; here it is replaced in the ranks of the second host. Containers
and users of one machine are told apart by their namespaces and ids.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, init
from ranks import ranks
from unisono.transport.host import Host

REMEDY = "make a unisono group on each and one of gloo between them"
PR_SET_DUMPABLE = 4
BOOT_ID = "unisono.transport.host._boot_id"


def passes(rank: int, world_size: int, meeting: str) -> None:
    """Was in another default group before: later groups must not meet under its name, which the other ranks lack."""
    init(meeting, rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


def spans(rank: int, world_size: int, meeting: str) -> tuple[Fault, list[float], Fault]:
    """A default group over both hosts; then Gloo's, in which each host has a group, and one spans both."""
    host = "first" if rank < 2 else "second"
    with patch(BOOT_ID, lambda: host):
        default = attempt(lambda: init(meeting, rank, world_size, 20.0))
        init(f"{meeting}-gloo", rank, world_size, 20.0, "gloo")
        inside = [dist.new_group([first, first + 1], backend="unisono") for first in (0, 2)][rank // 2]
        across = dist.new_group([1, 2], backend="unisono")
        x = torch.tensor([float(rank), 1.0])
        dist.all_reduce(x, group=inside)
        dist.barrier()
        late = attempt(lambda: rank in (1, 2) and dist.all_reduce(torch.zeros(1), group=across))
        dist.barrier()
        dist.destroy_process_group()
    return default, x.tolist(), late


def test_a_group_serves_one_host(tmp_path) -> None:
    ranks(2, group=False).run(passes, str(tmp_path / "before"))
    answers = ranks(4, group=False).run(spans, str(tmp_path / "meeting"))
    for rank, (default, _, _) in enumerate(answers):
        other = "[23]" if rank < 2 else "[01]"
        default.says("UsageError", rf"rank {other} \(pid \d+ on \S+\) runs on another host than rank {rank} \(", REMEDY)
        assert default.seconds < 5.0
    assert [total for _, total, _ in answers] == [[1.0, 2.0]] * 2 + [[5.0, 2.0]] * 2
    _, *of_the_span, _ = (late for _, _, late in answers)
    for late, rank, other, kind in zip(of_the_span, (1, 2), (2, 1), ("PeerLostError", "UsageError"), strict=True):
        late.says(kind, rf"rank {other} \(pid \d+ on \S+\) runs on another host than rank {rank} \(", REMEDY)
        assert late.seconds < 5.0


def meets_others(rank: int, world_size: int, meeting: str, differs: int) -> Fault:
    """Ranks whose hosts differ in one field, rank 0's from the others'."""
    fields: list[Any] = ["boot", 1, 1, 1]
    fields[differs] = 2 + (rank > 0)
    with patch.object(Host, "mine", lambda: Host(*fields)):
        return attempt(lambda: init(meeting, rank, world_size, 20.0))


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        (1, r"runs in another PID namespace \(containers, say\) than rank \d \(on .*--pid=host"),
        (2, r"runs in another user namespace \(containers, say\) than rank \d \(on .*--userns=host"),
        (3, r"runs as another user \(uid \d, not \d\) than rank \d \(on .*run all ranks as one user"),
    ],
)
def test_containers_and_users_are_hosts_of_their_own(differs: int, words: str, tmp_path: Path) -> None:
    with Job(meets_others, 3, str(tmp_path / "meeting"), differs, group=False) as job:
        told = job.results()
    for rank, fault in enumerate(told):
        fault.says("UsageError", rf"^rank {'[12]' if rank == 0 else '0'} \(pid \d+ on \S+\) {words}")
        assert fault.seconds < 5.0


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
PROGRAM = """
import datetime, sys, torch.distributed as dist
wait = datetime.timedelta(seconds=30)
dist.init_process_group("unisono", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=wait)
"""


@pytest.mark.parametrize("both", [True, False])
def test_real_pid_namespaces(both: bool, tmp_path: Path) -> None:
    """Both ranks may have the same pid, 1."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("may not make a PID namespace")
    command = [sys.executable, "-c", PROGRAM, f"file://{tmp_path / 'meeting'}"]
    starts = [[*(NAMESPACE if both or rank else []), *command, str(rank)] for rank in (0, 1)]
    processes = [subprocess.Popen(start, stderr=subprocess.PIPE, text=True) for start in starts]
    for rank, process in enumerate(processes):
        _, error = process.communicate(timeout=60)
        last = error.strip().splitlines()[-1]
        assert f"UsageError: rank {1 - rank} (pid" in last
        assert f"runs in another PID namespace (containers, say) than rank {rank} (on" in last


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
