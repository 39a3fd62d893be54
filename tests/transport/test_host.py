"""What makes two ranks' hosts one, and what is said where they are not."""

import subprocess
import sys

import pytest

from unisono.transport import host
from unisono.transport.host import Host, HostMap, Place, barred, unseen

HERE = Host("boot", 1, 2, 3)


def test_a_host_is_one_word_and_back() -> None:
    assert Host.from_text(Host.mine().to_text()) == Host.mine()
    assert len(Host.mine().to_text().split()) == 1


def places(*hosts: str) -> list[Place]:
    return [Place(host, f"name-{host}", "127.0.0.1", rank, 4) for rank, host in enumerate(hosts)]


def test_the_map_of_hosts() -> None:
    hosts = HostMap(places("a", "b", "a", "a"), 1)
    assert hosts.hosts == [[0, 2, 3], [1]]
    assert (hosts.mine, hosts.local, hosts.remote) == (1, [1], [0, 2, 3])
    assert [hosts.proxy(rank, 1) for rank in (0, 2, 3)] == [1, 1, 1]
    assert hosts.proxy(1, 0) == 0
    assert hosts.proxied == [0, 2, 3]
    assert HostMap(places("a", "b", "a", "a"), 2).proxied == []


def test_a_host_with_more_ranks_than_cores_counts_for_all() -> None:
    assert not HostMap(places("a", "b", "b"), 0).oversubscribed
    assert HostMap([*places("a"), *(place._replace(cores=1) for place in places("b", "b"))], 0).oversubscribed


def test_pids_are_looked_up_in_one_namespace_of_one_kernel() -> None:
    assert HERE.sees(HERE._replace(user=9))
    assert not HERE.sees(HERE._replace(pid_namespace=9))
    assert not HERE.sees(HERE._replace(boot="other"))


def test_proc_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unseen() == ""
    monkeypatch.setattr(host.os, "getpid", lambda: 1)
    assert "/proc shows another PID namespace, or none" in unseen()
    assert "--mount-proc" in unseen()


def test_a_process_that_may_not_be_opened() -> None:
    """The kernel's lines on it tell why, as long as it is there."""
    sleeper = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert "it is not dumpable" in barred(process.pid)
        process.kill()
    assert barred(process.pid) == "the kernel forbids it"
