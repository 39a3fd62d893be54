"""Hosts of which one does not come, or can not be reached: every rank logs one line about it within 10 s."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.conftest import Command, Network

PROGRAM = """
import datetime, os, time
import torch.distributed as dist
from unisono.backend import birth
birth.versions = lambda: {"unisono": os.environ.get("VERSION", "1.0"), "torch": "2.13.0"}
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


def start(net: Network, k: int, folder: Path, world_size: int, rank: int | None = None, **more: str) -> Command:
    """A rank, number ``k`` by default, on host ``k``; ``more`` are variables of its environment."""
    if not (program := folder / "program.py").exists():  # once: another rank may read it now
        program.write_text(PROGRAM)
    variables = {"RANK": f"{k if rank is None else rank}", "WORLD_SIZE": f"{world_size}", **more}
    return net.start(k, [sys.executable, str(program)], variables)


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


def ends(command: Command) -> tuple[str, float]:
    """The last line of a rank that ends by an error, and how long it took, in seconds; the import is left out."""
    while "begins" not in command.text:
        assert command.running.poll() is None, command.text
        time.sleep(0.05)
    since = time.monotonic()
    code, text = command.end(70.0)
    assert code == 1, text
    return next(line for line in reversed(text.splitlines()) if "Error: " in line), time.monotonic() - since


def test_hosts_with_different_versions(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    for line, seconds in map(ends, [start(net, k, tmp_path, 2, VERSION=f"1.{k}") for k in range(2)]):
        assert "MismatchError: the ranks of the default group run different versions of unisono" in line
        assert "rank 0: 1.0, rank 1: 1.1" in line
        assert seconds < 10.0


@pytest.mark.parametrize("odd", [0, 1])
def test_an_interface_that_does_not_exist(odd: int, make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    """Also on the first rank, whose end is that of the job's store."""
    net = make_hosts()
    running = [start(net, k, tmp_path, 2, **({"GLOO_SOCKET_IFNAME": "ib7"} if k == odd else {})) for k in range(2)]
    found = list(map(ends, running))
    mine, other = found[odd][0], found[1 - odd][0]
    assert f"UsageError: there is no network interface 'ib7' on host{odd}: it has lo, " in mine
    assert "PeerLostError" in other
    assert f"rank {odd}" in other
    assert f"no network interface 'ib7' on host{odd}" in other
    assert max(seconds for _, seconds in found) < 10.0


def test_a_transport_that_torch_does_not_have(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    """torch's wheels have Gloo without TLS; nothing goes unencrypted over hosts where it is wanted."""
    net = make_hosts()
    wanted = "GLOO_DEVICE_TRANSPORT is TCP_TLS: torch"
    for line, seconds in map(ends, [start(net, k, tmp_path, 2, GLOO_DEVICE_TRANSPORT="TCP_TLS") for k in range(2)]):
        assert wanted in line
        assert "is built without it" in line
        assert "encrypt the network" in line
        assert seconds < 10.0


def test_an_interface_that_leads_nowhere(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    """Both hosts have a network of their own beside the common one, and one is told to use that."""
    net = make_hosts()
    for command in ("link add side type veth peer name end", "addr add 10.9.0.1/24 dev side", "link set end up",
                    "link set side up"):  # fmt: skip
        assert net.start(1, ["ip", *command.split()]).end()[0] == 0
    running = [start(net, 0, tmp_path, 2), start(net, 1, tmp_path, 2, GLOO_SOCKET_IFNAME="side")]
    for (line, seconds), rank in zip(map(ends, running), range(2), strict=True):
        assert "PeerLostError: the ranks can not be connected over" in line
        assert f"rank {1 - rank} (pid " in line
        assert seconds < 10.0
