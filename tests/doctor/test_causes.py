"""Causes that take more, or other, hosts than the namespaces of tests/hosts give; facts are made up."""

import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.doctor.causes import CAUSES, Diagnosis, Finding
from unisono.doctor.probes import NAMING_SECONDS, Probes, _naming, endpoint_is_here
from unisono.topo.facts import Facts, InterfaceFacts, host_facts
from unisono.topo.links import LinkCost

COSTS = LinkCost(1e-4, 8e-9)


def host(k: int, **more: Any) -> Facts:
    """Host k of several: all is right, but for what is given."""
    address = f"10.0.0.{k + 1}"
    eth0 = InterfaceFacts("eth0", (address,), 1500, 1000, "up", False)
    right: dict[str, Any] = {
        "hostname": f"host{k}", "rank": 2 * k, "world_size": 6, "local_world_size": 2, "launcher": "torchrun",
        "own_name": (address,), "master": "10.0.0.1", "master_addresses": ("10.0.0.1",), "towards": address,
        "towards_interface": "eth0", "interfaces": (eth0,), "allowed_cores": 2, "cores": 2, "quota": 0.0,
        "nofile": 65536, "memlock": -1, "infiniband": {}, "shm": 1 << 34, "variables": {"MASTER_ADDR": "10.0.0.1"},
    }  # fmt: skip
    return replace(host_facts("localhost"), **{**right, **more})


def findings(*hosts: Facts, probes: Mapping[int, Probes] | None = None, absent: int = 0) -> list[Finding]:
    """What is found on these hosts; ``probes`` of some of them replace those of a network without a flaw."""
    keys = [each.key for each in hosts]
    found = {}
    for k, key in enumerate(keys):
        others = [each for each in keys if each != key]
        right = Probes(dict.fromkeys(others, COSTS), dict.fromkeys(others, "passed"), seconds=0.1, clock=1e9)
        found[key] = (probes or {}).get(k, right)
    exchange: Any = SimpleNamespace(seconds=10.0)
    d = Diagnosis(hosts[0], list(hosts), exchange, {}, 2 * len(hosts) + absent, {}, found, "")
    return [each for cause in CAUSES for each in cause.find(d)]


def test_where_all_is_right_nothing_is_found() -> None:
    assert findings(host(0), host(1), host(2)) == []


def test_a_name_that_does_not_resolve() -> None:
    (found,) = findings(host(0), host(1, own_name=()))
    assert found == ("own name", "host1", "its own name host1 does not resolve", found.remedy)
    assert "`10.0.0.2 host1` in /etc/hosts there" in found.remedy


@pytest.mark.parametrize(("seconds", "words"), [(1.2, "1.2 s for the name"), (NAMING_SECONDS, "3 s or more for the")])
def test_a_resolver_that_is_slow(seconds: float, words: str) -> None:
    (first, second) = host(0), host(1)
    right = Probes({first.key: COSTS}, {first.key: "passed"}, seconds=0.1, clock=1e9, naming=seconds)
    (found,) = findings(first, second, probes={1: right})
    assert found[:2] == ("resolver", "host1")
    assert words in found.words
    assert "RES_OPTIONS" in found.remedy


def test_how_long_names_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def name(address: tuple[str, int], flags: int) -> tuple[str, str]:
        asked.append(address[0])
        time.sleep(0.2 if address[0].endswith("2") else 0.0)
        raise OSError

    monkeypatch.setattr("socket.getnameinfo", name)
    assert 0.2 <= _naming(["10.0.0.1", "10.0.0.2", "fe80::1"]) < NAMING_SECONDS
    assert sorted(asked) == ["::ffff:10.0.0.1", "::ffff:10.0.0.2", "fe80::1"]


def test_a_name_that_stands_for_another_network() -> None:
    two = (*host(1).interfaces, InterfaceFacts("docker0", ("172.17.0.1",), 1500, 0, "up", False))
    (found,) = findings(host(0), host(1, interfaces=two, own_name=("172.17.0.1",)))
    assert found.words.startswith(
        "its own name stands for docker0, which Gloo takes, but packets to 10.0.0.1 leave by eth0"
    )
    assert found.remedy == "set GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 there"
    named = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert findings(host(0), host(1, interfaces=two, own_name=("172.17.0.1",), variables=named)) == []


@pytest.mark.parametrize(
    ("variable", "text", "wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "eth", True),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", False),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", False),
    ],
)
def test_interfaces_are_read_as_gloo_and_nccl_do(variable: str, text: str, wrong: bool) -> None:
    found = findings(host(0), host(1, variables={variable: text}))
    assert [each.cause for each in found] == ["interface"] * wrong


def test_a_master_address_that_means_every_host_itself() -> None:
    (found,) = findings(host(0), host(1, master="localhost", master_addresses=("127.0.0.1",)))
    assert found.words == "localhost means 127.0.0.1 there, not rank 0's host"
    assert found.remedy == "set MASTER_ADDR to an address of host0 on every host"


def test_the_odd_version_out() -> None:
    versions = host(0).versions
    (found,) = findings(host(0, versions={**versions, "torch": "2.11.0"}), host(1), host(2))
    assert (found.cause, found.host) == ("versions", "host0")
    assert found.words == f"torch 2.11.0, the others have {versions['torch'].partition('+')[0]}"


def test_a_quota_below_the_ranks() -> None:
    (found,) = findings(host(0), host(1, quota=0.5))
    assert (found.cause, found.words) == ("slow host", "2 ranks share 0.5 of 2 cores: its container's quota is 0.5")


def test_a_link_that_is_slower_than_the_others() -> None:
    three = host(0), host(1), host(2)
    slow = {three[0].key: LinkCost(1e-2, 8e-8), three[1].key: COSTS}
    (found,) = findings(*three, probes={2: Probes(slow, dict.fromkeys(slow, "passed"), seconds=0.1, clock=1e9)})
    assert (found.cause, found.host) == ("slow host", "host2")
    assert found.words == "its link to host0 takes 10 ms and carries 0.1 Gbit/s, the median 100 µs and 1 Gbit/s"


def test_limits_of_processes() -> None:
    (files,) = findings(host(0), host(1, nofile=256, world_size=512))
    assert (files.cause, files.remedy) == ("limits", "ulimit -n 2304 there")
    (locked,) = findings(host(0), host(1, memlock=65536, infiniband={"mlx5_0 port 1": "4: ACTIVE"}))
    assert locked.words == "a process may lock 64 KiB; RDMA registers more"


def test_a_clock_that_is_wrong() -> None:
    three = host(0), host(1), host(2)
    links = {each.key: COSTS for each in three[1:]}
    (found,) = findings(*three, probes={0: Probes(links, dict.fromkeys(links, "passed"), seconds=0.1, clock=1e9 - 60)})
    assert (found.cause, found.host) == ("clocks", "host0")
    assert found.words.startswith("its clock is 60 s behind")


def test_absent_ranks() -> None:
    (found,) = findings(host(0), host(1), absent=2)
    assert found.words == "2 of 6 ranks did not come within 10 s; there are host0 (ranks 0, 1), host1 (ranks 2, 3)"


@pytest.mark.parametrize(
    "endpoint", ["localhost", "localhost:29400", "127.0.0.1:29400", "127.0.0.1", "10.255.255.1:1", "x.invalid"]
)
def test_endpoints_are_taken_as_torchrun_takes_them(endpoint: str) -> None:
    utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    host_of, _ = utils.parse_rendezvous_endpoint(endpoint, 29400)
    assert endpoint_is_here(endpoint) == utils._matches_machine_hostname(host_of)
