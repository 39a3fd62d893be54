"""`unisono doctor` on two hosts: each cause is made, found on the host that has it, and answered with its remedy."""

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import mpi
from hosts.conftest import Command, Network

DOCTOR = [sys.executable, "-m", "unisono.cli", "doctor", "--json"]
Make = Callable[..., Network]


def ranks(k: int, **more: str) -> dict[str, str]:
    """What torchrun sets for the only rank of host k of two; ``more`` replaces some of it."""
    return {"RANK": f"{k}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **more}


def start(net: Network, k: int, *before: str, options: tuple[str, ...] = (), **more: str) -> Command:
    return net.start(k, [*before, *DOCTOR, *options], ranks(k, **more))


def report(code: int, text: str, expected: int = 1) -> dict[str, Any]:
    """What a doctor printed as JSON."""
    assert code == expected, text
    data: dict[str, Any] = json.loads(text)
    return data


def on_both(
    net: Network, options: tuple[str, ...] = (), first: Mapping[str, str] = {}, second: Mapping[str, str] = {}
) -> list[tuple[str, str, str, str]]:
    """The findings of a doctor on both hosts; that on the first one prints for both."""
    running = [start(net, 0, options=options, **first), start(net, 1, options=options, **second)]
    (code, text), (other, silent) = (each.end() for each in running)
    assert (other, silent) == (code, ""), silent
    return [tuple(each.values()) for each in report(code, text)["findings"]]  # type: ignore[misc]


def says(findings: list[tuple[str, str, str, str]], cause: str, host: str, words: str, remedy: str) -> None:
    """Asserts that a cause was found on a host, in words and with a remedy (regular expressions)."""
    found = [each for each in findings if each[:2] == (cause, host)]
    assert any(re.search(words, each[2]) and re.search(remedy, each[3]) for each in found), findings


def test_what_is_right_is_said_with_its_values(make_hosts: Make) -> None:
    net = make_hosts()
    running = [start(net, k) for k in range(2)]
    data = report(*running[0].end(), expected=0)
    assert running[1].end() == (0, "")
    assert data["findings"] == []
    assert [(host["name"], host["rank"]) for host in data["hosts"]] == [("host0", 0), ("host1", 1)]
    assert data["right"]["ranks"] == "host0 (rank 0), host1 (rank 1)"
    assert data["right"]["interface"] == "host0 eth0 (10.77.0.1), host1 eth0 (10.77.0.2)"
    assert set(data["right"]) == {
        "ranks", "own name", "resolver", "interface", "master address", "open ports", "master port", "endpoint",
        "versions", "/dev/shm", "MTU", "slow host", "limits", "clocks",
    }  # fmt: skip
    assert 0 < data["probes"]["host0"]["links"]["host1"]["alpha"] < 0.1
    assert data["probes"]["host1"]["datagrams"] == {"host0": "passed"}


def test_own_names_that_are_loopback_addresses(make_hosts: Make) -> None:
    net = make_hosts(loopback_name=True)
    findings = on_both(net, second={"GLOO_SOCKET_IFNAME": "eth0"})
    assert [each[:2] for each in findings] == [("own name", "host0")]
    says(findings, "own name", "host0", r"resolves to 127\.0\.1\.1", r"GLOO_SOCKET_IFNAME=eth0.*`10\.77\.0\.1 host0`")


def test_interfaces_that_are_wrong_or_not_there(make_hosts: Make) -> None:
    net = make_hosts()
    bridge = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    assert net.start(1, ["sh", "-c", bridge]).end()[0] == 0
    findings = on_both(net, first={"GLOO_SOCKET_IFNAME": "eth9"}, second={"NCCL_SOCKET_IFNAME": "docker"})
    says(findings, "interface", "host0", r"eth9 names no interface there: it has lo, eth0", "GLOO_SOCKET_IFNAME=eth0")
    says(
        findings, "interface", "host1", r"=docker, but packets to 10\.77\.0\.1 leave by eth0", "NCCL_SOCKET_IFNAME=eth0"
    )
    assert len(findings) == 2


def test_a_master_port_behind_a_firewall(make_hosts: Make) -> None:
    net = make_hosts()
    assert net.start(0, ["ip", "rule", "add", "ipproto", "tcp", "sport", "29500", "blackhole"]).end()[0] == 0
    findings = on_both(net)
    words = r"10\.77\.0\.1 port 29500: timed out"
    says(
        findings,
        "master address",
        "host1",
        words,
        r"let host1 connect to TCP port 29500 of 10\.77\.0\.1.*--network host",
    )
    assert len(findings) == 1


@pytest.mark.parametrize("far", [True, False])
def test_a_host_that_nobody_reaches(far: bool, make_hosts: Make) -> None:
    """Each side reports for itself: the address that does not answer, and who has not come."""
    net = make_hosts()
    if far:
        net.hosts.block(0)
    running = [start(net, k, options=("--timeout", "4")) for k in ((0, 1) if far else (1,))]
    reports = [report(*each.end(20)) for each in running]
    there = [tuple(each.values()) for each in reports[-1]["findings"]]
    how = "(timed out|no route to host)" if far else "refused"
    says(there, "master address", "host1", rf"10\.77\.0\.1 port 29500: {how}", "firewall|a route|start rank 0")
    says(there, "open ports", "host1", rf"cannot connect to 10\.77\.0\.1 port 29501.*{how}", "run unisono doctor there")
    says(there, "ranks", "", r"1 of 2 ranks did not come within 4 s; there are host1 \(rank 1\)", "on every host")
    if far:
        says(
            [tuple(each.values()) for each in reports[0]["findings"]],
            "ranks",
            "",
            r"there are host0 \(rank 0\)",
            "every host",
        )


def test_random_ports_that_are_closed_while_the_master_port_is_open(make_hosts: Make) -> None:
    """Host 1 may not open connections to the ports that the kernel gives to listeners."""
    net = make_hosts()
    classes = "".join(f"tc class add dev eth0 parent 1: classid 1:{k} htb rate 1gbit && " for k in (1, 3))
    drop = (
        f"tc qdisc add dev eth0 root handle 1: htb default 1 && {classes}"
        "tc qdisc add dev eth0 parent 1:3 handle 30: bfifo limit 1 && "
        "tc filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip protocol 6 0xff "
        "match ip dport 0x8000 0x8000 match u8 0x02 0x12 at 33 flowid 1:3"
    )
    code, text = net.start(1, ["sh", "-c", drop]).end()
    if code:
        pytest.skip(f"the kernel can not drop by port: {text.strip()}")
    findings = on_both(net)
    says(
        findings,
        "open ports",
        "host1",
        r"cannot connect to host0 .*timed out.*though the master port is open",
        r"every TCP port of host0 \(sysctl net",
    )
    assert [each[:2] for each in findings] == [("open ports", "host1")]


def test_a_master_port_that_is_taken(make_hosts: Make) -> None:
    net = make_hosts()
    other = "import socket, time; door = socket.create_server(('', 29500)); print('ready', flush=True); time.sleep(60)"
    taker = net.start(0, [sys.executable, "-c", other])
    while "ready" not in taker.text:
        time.sleep(0.02)
    findings = on_both(net)
    remedy = r"MASTER_PORT=\d+ on all hosts, or torchrun --master-port 0"
    says(findings, "master port", "host0", rf"port 29500 is taken by pid {taker.running.pid} \(.*python", remedy)
    assert len(findings) == 1


def test_an_endpoint_that_no_host_or_every_host_serves(make_hosts: Make) -> None:
    net = make_hosts(loopback_name=True)
    own = {"GLOO_SOCKET_IFNAME": "eth0"}
    findings = on_both(net, ("--rdzv-endpoint", "10.77.0.1:29400"), own, own)
    says(findings, "endpoint", "host0", r"takes no host for that of --rdzv-endpoint 10\.77\.0\.1", "is_host=1 there")
    findings = on_both(net, ("--rdzv-endpoint", "localhost:29400"), own, own)
    says(
        findings,
        "endpoint",
        "",
        r"host0 and host1 each take themselves",
        r"give an address of one host, such as 10\.77",
    )


def test_versions_that_differ(make_hosts: Make, tmp_path: Path) -> None:
    for package, version in (("torch", "2.11.0"), ("nvidia_nccl_cu12", "2.27.5")):
        folder = tmp_path / "other" / f"{package}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    paths = ":".join([str(tmp_path / "other"), *sys.path])
    findings = on_both(make_hosts(), second={"PYTHONPATH": paths})
    says(
        findings,
        "versions",
        "host1",
        r"^torch 2\.11\.0, the others have 2\.\d+\.\d+",
        r"pip install torch==2\.\d+\.\d+$",
    )
    says(findings, "versions", "host1", r"^nccl 2\.27\.5, the others have none", "pip uninstall nvidia-nccl-cu12")
    assert len(findings) == 2


def test_a_small_shared_memory(make_hosts: Make) -> None:
    findings = on_both(make_hosts(shm="64m"))
    for host in ("host0", "host1"):
        says(findings, "/dev/shm", host, "has 64 MiB", "--shm-size=1g or --ipc=host")


def test_an_mtu_that_the_path_does_not_carry(make_hosts: Make) -> None:
    net = make_hosts()
    assert net.start(1, ["ip", "link", "set", "eth0", "mtu", "9000"]).end()[0] == 0
    findings = on_both(net)
    says(
        findings, "MTU", "host1", r"its MTU, 9000 bytes, do not reach host0, small ones do", "ip link set eth0 mtu 1500"
    )
    assert [each[:2] for each in findings] == [("MTU", "host1")]


def test_a_host_that_is_slow(make_hosts: Make) -> None:
    """On host 1 the doctor, once it waits for the other one, gets a tenth of the time."""
    net = make_hosts()
    slow = start(net, 1, options=("--timeout", "40"))
    time.sleep(3.0)
    other = start(net, 0, options=("--timeout", "40"))
    while slow.running.poll() is None:
        for number, seconds in ((signal.SIGSTOP, 0.09), (signal.SIGCONT, 0.01)):
            net.hosts.kill(1, slow.running.pid, number)
            time.sleep(seconds)
    findings = [tuple(each.values()) for each in report(*other.end())["findings"]]
    says(findings, "slow host", "host1", r"a computation takes .*, on the others", r"other work \(top\)")


def test_more_ranks_than_cores(make_hosts: Make) -> None:
    net, five = make_hosts(), {"WORLD_SIZE": "5"}
    running = [start(net, 0, **five), start(net, 1, "taskset", "-c", "0", **five, LOCAL_WORLD_SIZE="4")]
    findings = [tuple(each.values()) for each in report(*running[0].end())["findings"]]
    says(
        findings,
        "slow host",
        "host1",
        "4 ranks share 1 of 2 cores: its affinity",
        r"docker run --cpus\), or start fewer",
    )


def test_a_rank_that_is_there_twice(make_hosts: Make) -> None:
    findings = on_both(make_hosts(), second={"RANK": "0"})
    says(findings, "ranks", "host1", "has rank 0, and so has host0", "its own --node-rank")


def test_peers_without_a_launcher(make_hosts: Make) -> None:
    """Either host names the other, and prints the findings of both; one direction that works is enough."""
    net = make_hosts(loopback_name=True)
    rule = ["ip", "rule", "add", "ipproto", "tcp", "sport", "29501", "blackhole"]
    assert net.start(0, rule).end()[0] == 0  # nobody reaches host 0's port, it reaches host 1's
    running = [net.start(k, [*DOCTOR, "--peer", f"10.77.0.{2 - k}"]) for k in range(2)]
    for each in running:
        findings = [tuple(found.values()) for found in report(*each.end())["findings"]]
        assert sorted(found[:2] for found in findings) == [("own name", "host0"), ("own name", "host1")]


def test_under_torchrun(make_hosts: Make) -> None:
    """Two ranks a host: one of them speaks for it, and rank 0's for all."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "unisono.cli", "doctor"]
    first, second = (each.end() for each in make_hosts().on_all(torchrun))
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "unisono doctor   2 hosts, nothing wrong" in first[1]
    assert re.search(r"✓ ranks +host0 \(ranks 0, 1\), host1 \(ranks 2, 3\)", first[1])
    assert "unisono doctor" not in second[1]


def test_under_mpiexec(make_hosts: Make) -> None:
    """Nothing in the environment says where rank 0 is: its address goes by MPI."""
    start = (
        f"unset MASTER_ADDR MASTER_PORT; exec {mpi.found('MPICH')} -launcher ssh -launcher-exec $HOSTS_RSH "
        '-f $HOSTS_FILE -ppn 2 -n 4 env -u MASTER_ADDR -u MASTER_PORT "$@"'
    )
    command = ["sh", "-c", start, "sh", sys.executable, "-m", "unisono.cli", "doctor"]
    code, text = make_hosts().start(0, command, mpi.program_environment("MPICH")).end()
    assert code == 0, text
    assert "unisono doctor   2 hosts, nothing wrong" in text
    assert re.search(r"✓ ranks +host0 \(ranks 0, 1\), host1 \(ranks 2, 3\)", text)
