"""Facts of a host: read where the kernel keeps them, the same after a way through JSON."""

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from unisono.backend.launchers import RankPlace
from unisono.errors import UsageError
from unisono.topo import facts
from unisono.topo.facts import Facts, host_facts, resolve
from unisono.transport import interfaces as interfaces_module
from unisono.transport.interfaces import address_for_peers, address_towards, interface_of, interfaces, own_addresses


def test_facts_go_through_json() -> None:
    mine = host_facts("localhost", RankPlace("torchrun", 2, 4, 0, 2))
    assert Facts.from_data(json.loads(json.dumps(asdict(mine)))) == mine
    assert (mine.hostname, mine.rank, mine.local_world_size) == (socket.gethostname(), 2, 2)
    assert mine.cores >= mine.allowed_cores == len(os.sched_getaffinity(0))
    assert (mine.towards, mine.towards_interface) in (("127.0.0.1", "lo"), ("::1", "lo"))
    assert mine.shm == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    assert set(mine.versions) >= {"python", "unisono", "torch"}
    with pytest.raises((KeyError, TypeError)):
        Facts.from_data({"hostname": "a"})


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 0.0),
        ({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_quota_of_a_container(
    files: dict[str, str], quota: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(facts, "_own_cgroups", lambda controller: iter([tmp_path / "inner", tmp_path]))
    mine = host_facts("localhost")
    assert mine.quota == quota
    assert mine.usable_cores == min(mine.allowed_cores, quota or mine.allowed_cores)


def test_infiniband_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}.items():
        (port / name).write_text(f"{text}\n")
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ntest "$1" = topo && echo "GPU0 X NV18" || echo "0, NVIDIA H200, 143771 MiB"\n')
    program.chmod(0o755)
    monkeypatch.setattr(facts, "_IB", tmp_path / "infiniband")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    mine = host_facts("localhost")
    assert mine.infiniband == {"mlx5_0 port 1": "4: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"}
    assert mine.gpus == ("0, NVIDIA H200, 143771 MiB",)
    assert mine.gpu_links == "GPU0 X NV18"


def test_names_that_do_not_resolve_have_no_addresses() -> None:
    assert resolve("no-such-host.invalid") == ()
    assert "127.0.0.1" in resolve("localhost")


def test_interfaces() -> None:
    listed = {each.name: each for each in interfaces()}
    assert listed["lo"].loopback
    assert "127.0.0.1" in listed["lo"].addresses
    assert set(listed) == set(os.listdir("/sys/class/net")) - {"bonding_masters"}
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.255") == ""
    assert "127.0.0.1" not in own_addresses()
    assert "127.0.0.1" in own_addresses("lo")


def test_the_address_for_peers_is_no_loopback_where_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where MASTER_ADDR is unset, or an own name that Debian has resolve to 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    first = next(iter(own_addresses()), "127.0.0.1")
    assert address_for_peers("") == address_for_peers("127.0.1.1") == address_for_peers("no.invalid") == first
    monkeypatch.setattr(interfaces_module, "own_addresses", lambda name: ["172.17.0.1", "127.0.0.5"])
    monkeypatch.setattr(interfaces_module, "address_towards", {"host0": "127.0.0.1", "host1": "127.0.0.5"}.__getitem__)
    assert address_for_peers("host0", "host1") == "127.0.0.5"  # not that of docker0
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert address_for_peers("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(UsageError, match="there is no network interface 'eth99'"):
        address_for_peers("127.0.0.1")


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"^there is no network interface 'eth99' on .*: it has .*lo"):
        own_addresses("eth99")
