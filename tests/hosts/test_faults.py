"""What hosts and links do to a job on two hosts: every loss is named, on every host, and short ones lose nothing."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangs.job import attempt
from hosts.namespaces import CannotMakeHosts, Hosts, RankOfHost

pytestmark = pytest.mark.hosts
WHERE = (0, 0, 1, 1)
LIMIT = 15.0  # s after which a host that does not answer is lost


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts(2)
    except CannotMakeHosts as error:
        pytest.skip(f"no hosts here: {error}")
    with made:
        yield made


def start(hosts: Hosts, function: Callable[..., Any], folder: Path, *given: Any) -> list[RankOfHost]:
    """The ranks, once all of them have said that they are ready."""
    ranks = [hosts.rank(host, function, rank, 4, str(folder), *given) for rank, host in enumerate(WHERE)]
    deadline = time.monotonic() + 100.0
    while len(list(folder.glob("ready-*"))) < len(WHERE):
        assert time.monotonic() < deadline, [rank.result(0.1) for rank in ranks]
        time.sleep(0.05)
    return ranks


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


def test_values(hosts: Hosts, tmp_path: Path) -> None:
    answers = [rank.result(60.0) for rank in start(hosts, values, tmp_path)]
    assert answers == [[True] * 3] * 4


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


def test_a_killed_rank_is_named_within_a_second(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, loops, tmp_path)
    killed = time.time()
    ranks[3].signal(signal.SIGKILL)
    for kind, text, at in [rank.result(30.0) for rank in ranks[:3]]:
        assert kind == "PeerLostError"
        assert re.search(r"rank 3 \(pid \d+ on host1\) is (dead|lost)", text)
        assert at < killed + 1.0 + os.getloadavg()[0]


def test_a_lost_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, loops, tmp_path)
    unplugged = time.time()
    hosts.unplug(1)
    for rank, (kind, text, at) in enumerate(rank.result(60.0) for rank in ranks):
        assert kind == "PeerLostError"
        assert f"on host{1 - WHERE[rank]}) is lost" in text
        assert at < unplugged + LIMIT + 5.0


def test_a_cable_that_is_out_for_a_while_loses_nothing(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, loops, tmp_path)
    hosts.unplug(1)
    time.sleep(3.0)
    hosts.plug(1)
    time.sleep(2.0)
    (tmp_path / "stop").touch()
    assert [rank.result(60.0)[0] for rank in ranks] == [""] * 4


def test_a_stopped_rank_is_named_at_the_timeout(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, loops, tmp_path)
    ranks[3].signal(signal.SIGSTOP)
    for kind, text, _ in [rank.result(60.0) for rank in ranks[:3]]:
        assert kind == "CollectiveTimeout"
        assert re.search(r"rank 3 \(pid \d+ on host1\) last completed call no. \d+ all_reduce.*it is stopped", text)
