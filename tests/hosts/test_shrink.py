"""`unisono.shrink` over hosts: a rank is lost, then the process with the job's store, then a host."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from hangs.job import attempt
from hosts.conftest import Network
from hosts.test_faults import WHERE, Job


def shrinks(rank: int, world_size: int, folder: str) -> list[Any]:
    """Goes on after each loss: how the calls failed, how long the shrink took, this rank, and a sum of 1 per rank."""
    across, found = dist.new_group([1, 2]), []
    if rank in (1, 2):
        dist.barrier(across)
    for number in range(3):
        Path(folder, f"{'again-' * number}ready-{rank}").touch()
        fault = attempt(lambda: [(dist.all_reduce(torch.ones(4096)), time.sleep(0.002)) for _ in range(10**7)])
        began = time.monotonic()
        last = attempt(lambda: unisono.shrink(min_size=2))
        seconds = time.monotonic() - began
        x = torch.ones(100_000)
        if last.kind:
            return [*found, [fault.kind, last.text]]
        dist.all_reduce(x)
        ends = [0, dist.get_world_size() - 1]
        fresh = dist.new_group(ends)  # over the new store
        if dist.get_rank() in ends:
            dist.barrier(fresh)
        found.append([fault.kind, seconds, dist.get_rank(), x[-1].item()])
    return found


def until(folder: Path, names: list[str]) -> None:
    deadline = time.monotonic() + 60.0
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.05)
    time.sleep(0.2)


def test_ranks_of_both_hosts_go_on(
    make_hosts: Callable[..., Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_HOST_TIMEOUT", "4")
    job = Job(make_hosts(), shrinks, tmp_path)
    job.signal(3, signal.SIGKILL)
    until(tmp_path, [f"again-ready-{rank}" for rank in range(3)])
    job.signal(0, signal.SIGKILL)  # and with it the job's store, that of the first group
    until(tmp_path, ["again-again-ready-1", "again-again-ready-2"])
    job.hosts.unplug(1)
    ends = [rank.end(60.0)[1].strip().splitlines()[-1] for rank in job.ranks[1:3]]
    results = [json.loads(line.removeprefix("result ")) for line in ends]
    for rank, (first, second, last) in enumerate(results, 1):
        for row, place, size in ((first, rank, 3.0), (second, rank - 1, 2.0)):
            assert [row[0], *row[2:]] == ["PeerLostError", place, size]
            assert row[1] < 2.0 + os.getloadavg()[0]
        assert last[0] == "PeerLostError"
        assert "1 of 2 ranks are left, min_size is 2" in last[1]
        assert f"on host{rank % 2}) is lost" in last[1]


EXAMPLE = Path(__file__).parents[2] / "examples" / "12_survivors.py"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_loses_a_rank_then_a_host(
    kind: str, make_hosts: Callable[..., Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = make_hosts()
    settings = {"WORLD_SIZE": "4", "DEATHS": "10:3", "PAUSE": "0.1", "UNISONO_HOST_TIMEOUT": "4"}
    command = [sys.executable, "-u", str(EXAMPLE), *(["--fsdp"] if kind == "fsdp" else [])]
    started = [net.start(host, command, {**settings, "RANK": str(rank)}) for rank, host in enumerate(WHERE)]
    deadline = time.monotonic() + 60.0
    while "3 ranks go on" not in started[0].text:
        assert time.monotonic() < deadline, [each.text for each in started]
        time.sleep(0.05)
    time.sleep(0.5)
    net.hosts.unplug(1)  # first: nothing tells host0 that rank 2 ends, as when its power is cut
    net.hosts.kill(1, started[2].running.pid, signal.SIGKILL)
    printed = [each.end(60.0) for each in started[:2]]
    assert [code for code, _ in printed] == [0, 0], printed
    text = printed[0][1]
    assert re.search(r"after step 10: .*rank 3 \(pid \d+ on host1\) is (lost|dead): .*\n3 ranks go on", text)
    lost = re.search(r"after step (\d\d): .*rank 2 \(pid \d+ on host1\) is lost: .*\n2 ranks go on after (\S+) s", text)
    assert lost is not None, text
    assert 10 <= int(lost[1]) < 40
    assert float(lost[2]) < 2.0 + os.getloadavg()[0]
    assert re.search(r"loss 0\.5\d+ to 0\.0\d+; parameters differ from one process's by (0e\+00|\de-0[789])", text)
    assert (tmp_path / f"survivors-{kind}.png").stat().st_size > 5000
