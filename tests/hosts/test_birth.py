"""Hosts of which one does not come, or can not be reached: every rank logs one line about it within 10 s."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.conftest import Command, Network

PROGRAM = """
import datetime, time
import torch.distributed as dist
print("begins", flush=True)
dist.init_process_group("unisono", timeout=datetime.timedelta(seconds=60))
print("is made", flush=True)
time.sleep(60)
"""


def lines(command: Command) -> list[str]:
    """What a rank has logged 10 s after it began; torch's own lines are left out."""
    while "begins" not in command.text:
        assert command.running.poll() is None, command.text
        time.sleep(0.05)
    time.sleep(10.0)
    return [line for line in command.text.splitlines() if line.startswith("rank ")]


def start(net: Network, k: int, folder: Path, world_size: int, rank: int | None = None) -> Command:
    """A rank, number ``k`` by default, on host ``k``."""
    (folder / "program.py").write_text(PROGRAM)
    variables = {"RANK": f"{k if rank is None else rank}", "WORLD_SIZE": f"{world_size}"}
    return net.start(k, [sys.executable, f"{folder}/program.py"], variables)


def test_a_host_that_is_missing(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    running = [start(net, k, tmp_path, 3) for k in range(2)]
    for k, said in enumerate(map(lines, running)):
        assert len(said) == 1, said
        assert f"rank {k} of 3 (pid {running[k].running.pid} on host{k}): rank 2 did not come" in said[0]


def test_two_hosts_have_a_process_of_one_number(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    """Rank 2 is missing, so that all wait; where it is not, the others go on, and a late one is told."""
    net = make_hosts()
    running = [start(net, host, tmp_path, 3, rank) for host, rank in ((0, 0), (0, 1), (1, 1))]
    for k in (1, 2):
        code, text = running[k].end(20.0)
        assert code == 1
        mine, other = (f"pid {running[each].running.pid} on host{each - 1}" for each in (k, 3 - k))
        assert f"UsageError: rank 1 of the default group is claimed twice: by {mine} and by {other}; give" in text


def test_a_late_process_of_a_number_that_another_host_has(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    first = [start(net, 0, tmp_path, 2, rank) for rank in range(2)]
    while not all("is made" in each.text for each in first):
        assert all(each.running.poll() is None for each in first), [each.text for each in first]
        time.sleep(0.05)
    late = start(net, 1, tmp_path, 2, 1)
    (said,) = lines(late)
    assert f"rank 1 of 2 (pid {late.running.pid} on host1): another process, on another host, has joined" in said


@pytest.mark.parametrize("blocked", [True, False])
def test_an_address_that_nobody_answers(blocked: bool, make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    if blocked:
        net.hosts.block(0)
    (said,) = lines(start(net, 1, tmp_path, 2))
    why = "(timed out|no route to host)" if blocked else "connection refused"
    assert "can not reach rank 0's store at MASTER_ADDR 10.77.0.1, port 29500" in said
    assert any(each in said for each in why.strip("()").split("|"))
