"""What hosts and links do to a job on two hosts: every loss is named, on every host, and short ones lose nothing."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hangs.job import attempt
from hosts.conftest import Network

WHERE = (0, 0, 1, 1)
PS = ("ps", "--json")
LIMIT = 15.0  # s after which a host that does not answer is lost


class Job:
    """Four ranks, two on each of two hosts, that run a function of this module (rank.py)."""

    def __init__(
        self, net: Network, function: Callable[..., Any], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.net, self.hosts = net, net.hosts
        call = json.dumps([function.__module__, function.__name__, [str(folder)]])
        argv = [sys.executable, "-u", "-m", "hosts.rank", call]
        variables = [{"RANK": f"{rank}", "WORLD_SIZE": "4", **(env or {})} for rank in range(4)]
        self.ranks = [net.start(host, argv, each) for host, each in zip(WHERE, variables, strict=True)]
        deadline = time.monotonic() + 100.0
        while len(list(folder.glob("ready-*"))) < len(WHERE):
            assert time.monotonic() < deadline, [rank.text for rank in self.ranks]
            time.sleep(0.05)

    def signal(self, rank: int, number: int) -> None:
        """Signals a rank."""
        self.hosts.kill(WHERE[rank], self.ranks[rank].running.pid, number)

    def results(self, seconds: float, count: int = 4) -> list[Any]:
        """What the first ranks return."""
        return [self.result(rank, seconds) for rank in range(count)]

    def result(self, rank: int, seconds: float) -> Any:
        """What a rank returns."""
        lines = self.ranks[rank].end(seconds)[1].strip().splitlines()
        assert "".join(lines[-1:]).startswith("result "), lines
        return json.loads(lines[-1].removeprefix("result "))


def values(rank: int, world_size: int, folder: str) -> list[bool]:
    """Sums, gathers and messages between the hosts."""
    Path(folder, f"ready-{rank}").touch()
    x, y, z = torch.arange(300_000.0) + rank, torch.empty(4), torch.empty(200_000)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(y, torch.tensor([float(rank)]))
    sent = dist.isend(torch.full((200_000,), float(rank)), (rank + 2) % 4)
    dist.recv(z, (rank + 2) % 4)
    sent.wait()
    total = 4 * torch.arange(300_000.0) + 6
    return [torch.equal(x, total), y.tolist() == [0.0, 1.0, 2.0, 3.0], bool((z == (rank + 2) % 4).all())]


def test_values(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    assert Job(make_hosts(), values, tmp_path).results(60.0) == [[True] * 3] * 4


def loops(rank: int, world_size: int, folder: str) -> tuple[str, str, float]:
    """all_reduce until something fails, or rank 0 finds the file ``stop``: the error, its text, when."""
    stop = Path(folder, "stop")

    def calls() -> None:
        for step in range(10**7):
            x = torch.ones(2048)
            x[0] = float(rank == 0 and stop.exists())
            dist.all_reduce(x)
            assert bool((x[1:] == world_size).all())
            if step == 5:
                Path(folder, f"ready-{rank}").touch()
            if x[0] > 0:
                return
            time.sleep(0.002)

    fault = attempt(calls)
    return fault.kind, fault.text, time.time()


def test_a_killed_rank_is_named_within_a_second(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    job = Job(make_hosts(), loops, tmp_path)
    killed = time.time()
    job.signal(3, signal.SIGKILL)
    for kind, text, at in job.results(30.0, 3):
        assert kind == "PeerLostError"
        assert re.search(r"rank 3 \(pid \d+ on host1\) is (dead|lost)", text)
        assert at < killed + 1.0 + os.getloadavg()[0]


def test_a_lost_host_is_named(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    job = Job(make_hosts(), loops, tmp_path)
    unplugged = time.time()
    job.hosts.unplug(1)
    for rank, (kind, text, at) in enumerate(job.results(60.0)):
        assert kind == "PeerLostError"
        assert f"on host{1 - WHERE[rank]}) is lost" in text
        assert at < unplugged + LIMIT + 5.0


def test_a_cable_that_is_out_for_a_while_loses_nothing(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    job = Job(make_hosts(), loops, tmp_path)
    job.hosts.unplug(1)
    time.sleep(3.0)
    job.hosts.plug(1)
    time.sleep(2.0)
    (tmp_path / "stop").touch()
    assert [kind for kind, _, _ in job.results(60.0)] == [""] * 4


def test_a_stopped_rank_is_named_at_the_timeout(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    job = Job(make_hosts(), loops, tmp_path)
    job.signal(3, signal.SIGSTOP)
    for kind, text, _ in job.results(60.0, 3):
        assert kind == "CollectiveTimeout"
        assert re.search(r"rank 3 \(pid \d+ on host1\) last completed call no. \d+ all_reduce.*it is stopped", text)


def test_ps_shows_the_ranks_of_both_hosts(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    job = Job(make_hosts(), loops, tmp_path)
    job.signal(3, signal.SIGSTOP)
    time.sleep(1.5)
    for host in (0, 1):
        code, text = job.net.start(host, [sys.executable, "-c", "from unisono.cli.main import main; main()", *PS]).end()
        assert code == 0, text
        (seen,) = json.loads(text)
        found = {rank["rank"]: (rank["host"], rank["pid"], rank["state"]) for rank in seen["ranks"]}
        pids = [rank.running.pid for rank in job.ranks]
        states = ["waiting", "waiting", "waiting", "stopped"]
        assert found == {rank: (f"host{WHERE[rank]}", pids[rank], states[rank]) for rank in range(4)}
        assert any("rank 3" in words and "is stopped" in words for words in seen["remarks"])
    job.signal(3, signal.SIGCONT)
    (tmp_path / "stop").touch()
    assert [kind for kind, _, _ in job.results(60.0)] == [""] * 4
