"""What makes two ranks' hosts one, and what is said where they are not."""

import subprocess
import sys

import pytest

from unisono.transport import host
from unisono.transport.host import Host, barred, unseen

HERE = Host("boot", 1, 2, 3)


def test_a_host_is_one_word_and_back() -> None:
    assert Host.from_text(Host.mine().to_text()) == Host.mine()
    assert len(Host.mine().to_text().split()) == 1


@pytest.mark.parametrize(
    ("there", "words", "remedy"),
    [
        (HERE._replace(boot="other", pid_namespace=9), "runs on another host", "gloo between them"),
        (HERE._replace(pid_namespace=9), r"runs in another PID namespace (containers, say)", "--pid=host"),
        (HERE._replace(user_namespace=9), r"runs in another user namespace (containers, say)", "--userns=host"),
        (HERE._replace(pid_namespace=9, user_namespace=9), "another PID namespace and another user namespace", "--pid"),
        (HERE._replace(user=9), "runs as another user (uid 9, not 3)", "run all ranks as one user"),
    ],
)
def test_what_keeps_ranks_apart(there: Host, words: str, remedy: str) -> None:
    apart, what_to_do = HERE.difference(there)
    assert words in apart
    assert remedy in what_to_do


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
