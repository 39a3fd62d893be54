"""Faults at random moments of a job on two hosts of two ranks: always named, nobody hanging, nothing left behind."""

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hangs.job import attempt
from hosts.conftest import Network
from hosts.test_faults import WHERE, Job

LIMITS = {"UNISONO_HOST_TIMEOUT": "3", "GROUP_SECONDS": "8"}
FAULTS = ("kill", "stop", "unplug", "block", "plug again")
OVER = "(given this group up|left the group .* after an error)"
LEFT = """
import pathlib
pids = pathlib.Path('/proc').glob('[0-9]*')
print([pid.name for pid in pids if b'-m\\0hosts.rank' in (pid / 'cmdline').read_bytes()])
"""


def calls(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Calls of every size and kind until something fails, or rank 0 finds the file ``stop``: the error, its text."""
    stop, chance = Path(folder, "stop"), random.Random(7)

    def step() -> bool:
        numel = chance.choice((1, 2000, 50_000, 300_000))
        x = torch.full((numel + 1,), float(rank))
        x[0] = float(rank == 0 and stop.exists())
        dist.all_reduce(x)
        assert bool((x[1:] == 6.0).all())
        ends, peer = bool(x[0]), (rank + 2) % 4
        if chance.random() < 0.3:
            y = torch.empty(numel)
            works = [dist.isend(torch.full((numel,), float(rank)), peer), dist.irecv(y, peer)]
            for work in works:
                work.wait()
            assert bool((y == peer).all())
        if chance.random() < 0.3:
            every = torch.empty(4 * numel)
            dist.all_gather_into_tensor(every, torch.full((numel,), float(rank)))
            assert torch.equal(every, torch.arange(4.0).repeat_interleave(numel))
        Path(folder, f"ready-{rank}").touch()
        return not ends

    def loop() -> None:
        while step():
            pass

    fault = attempt(loop)
    return fault.kind, fault.text


def act(job: Job, fault: str, rank: int, folder: Path) -> list[int]:
    """Makes the fault; returns the ranks that must say so."""
    if fault in ("kill", "stop"):
        job.signal(rank, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return [each for each in range(4) if each != rank]
    (job.hosts.block if fault == "block" else job.hosts.unplug)(WHERE[rank])
    if fault == "plug again":
        time.sleep(1.0)
        job.hosts.plug(WHERE[rank])
        time.sleep(0.5)
        (folder / "stop").touch()
    return list(range(4))


def check(fault: str, rank: int, named: list[int], ended: dict[int, tuple[str, str]]) -> None:
    """Asserts that the error of each of these ranks names what was done to ``rank`` or its host."""
    host = WHERE[rank]
    for each in named:
        kind, text = ended[each]
        if fault == "plug again":
            assert kind == "", (fault, rank, each, text)
        elif fault == "stop":
            if kind == "PeerLostError":  # its calls began later: it reads why another one has given up
                assert re.search(f" has {OVER}", text), (rank, each, text)
            else:
                assert kind == "CollectiveTimeout", (fault, rank, each, kind, text)
            # Where its neighbour has left first, as its calls began earlier, nobody can say more.
            here = WHERE[each] == host and kind == "CollectiveTimeout"
            state = "it is stopped" if here else "it (is stopped|does not answer)"
            assert re.search(rf"rank {rank} \(pid \d+ on host{host}\).* {state}", text), (rank, each, text)
        elif fault == "kill":
            assert kind == "PeerLostError", (fault, rank, each, kind, text)
            assert re.search(rf"rank {rank} \(pid \d+ on host{host}\) is (dead|lost)", text), (rank, each, text)
        else:
            assert kind == "PeerLostError", (fault, rank, each, kind, text)
            assert re.search(rf"on host{1 - WHERE[each]}\) is lost", text), (fault, rank, each, text)
    assert fault != "stop" or any(kind == "CollectiveTimeout" for kind, _ in ended.values())


def rounds(net: Network, folder: Path, seed: int, count: int) -> None:
    chance = random.Random(seed)
    for number in range(count):
        fault, rank = FAULTS[number % len(FAULTS)], chance.randrange(4)
        here = folder / f"round-{number}"
        here.mkdir()
        job = Job(net, calls, here, LIMITS)
        time.sleep(chance.uniform(0.0, 1.0))
        named = act(job, fault, rank, here)
        ended = {each: job.result(each, 40.0) for each in named}
        print(number, fault, rank, {each: text[:160] for each, (_, text) in ended.items()}, flush=True)
        check(fault, rank, named, ended)
        if fault in ("unplug", "block"):
            (net.hosts.plug if fault == "unplug" else net.hosts.unblock)(WHERE[rank])
        if fault == "stop":
            job.signal(rank, signal.SIGCONT)
            assert job.result(rank, 40.0)[0], "the rank that was stopped goes on alone"
        job.ranks[rank].end(20.0)
        for command in net.on_all(["python3", "-c", LEFT]):
            assert command.end(20.0)[1].strip() == "[]"


def test_faults_at_random_moments(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    rounds(make_hosts(), tmp_path, 1, 5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_hundred_faults(make_hosts: Callable[..., Network], tmp_path: Path, seed: int) -> None:
    rounds(make_hosts(), tmp_path, seed, 5)
