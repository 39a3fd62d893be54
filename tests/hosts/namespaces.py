"""Hosts on one machine: Linux namespaces joined by a bridge, each with its own network, processes and host name.

    with Hosts(2, rate="1gbit") as hosts:
        ranks = [hosts.rank(k, function, rank, size) for rank, k in enumerate((0, 0, 1, 1))]
        hosts.unplug(1)                 # no carrier, nothing passes; `plug` puts the cable back
        answers = [rank.result(30.0) for rank in ranks]

A rank is a program that runs one function, found by its module and name, and prints its result. Needs Linux, root, and
`unshare`, `nsenter`, `ip` and `tc`; raises `CannotMakeHosts` where something is missing.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["CannotMakeHosts", "Hosts", "RankOfHost"]

_NETWORK = "10.78.0"
_PORT = 29511
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_TESTS = Path(__file__).parent.parent


class CannotMakeHosts(RuntimeError):
    """This machine can not make hosts; the text says what is missing."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMakeHosts(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class _Holder:
    """A process that keeps namespaces; everything in its PID namespace ends with it."""

    def __init__(self, *kinds: str) -> None:
        command = ["unshare", "--kill-child", "--fork", *kinds, "sleep", "infinity"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 5.0
        while not (found := _children(self.process.pid)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise CannotMakeHosts("no namespaces: unshare failed, which needs root")
            time.sleep(0.005)
        self.pid = found[0]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class RankOfHost:
    """One rank under way."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def signal(self, number: int) -> None:
        """Signals the rank itself, which is a child of the command that entered its host."""
        for pid in _children(self._process.pid):
            os.kill(pid, number)

    def result(self, seconds: float) -> Any:
        """The result of the function; raises `AssertionError` with what the rank printed if there is none in time."""
        try:
            output, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGUSR2)  # prints its stacks
            time.sleep(0.5)
            self.signal(signal.SIGKILL)
            output, _ = self._process.communicate()
            raise AssertionError(f"no result in {seconds:g} s:\n{output}") from None
        *_, last = output.strip().splitlines() or [""]
        assert last.startswith("result "), output
        return json.loads(last.removeprefix("result "))

    def end(self) -> None:
        """Kills the rank, if it is still there."""
        self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Hosts:
    """``count`` hosts, host k with address 10.78.0.(k + 1) on eth0 and the name ``host{k}``."""

    def __init__(self, count: int, rate: str = "1gbit") -> None:
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise CannotMakeHosts(f"no {', '.join(missing)} here")
        if os.geteuid() != 0:
            raise CannotMakeHosts("only root may make network namespaces")
        self._holders: list[_Holder] = []
        self._ranks: list[RankOfHost] = []
        try:
            self._switch = self._hold("--net")
            self._inside(self._switch, "ip", "link", "add", "switch", "type", "bridge")
            self._inside(self._switch, "ip", "link", "set", "switch", "up")
            self._hosts = [self._join(number, rate) for number in range(count)]
        except BaseException:
            self.end()
            raise

    def _hold(self, *kinds: str) -> _Holder:
        holder = _Holder(*kinds)
        self._holders.append(holder)
        return holder

    def _inside(self, holder: _Holder, *command: str) -> None:
        _run("nsenter", "--target", str(holder.pid), "--net", "--uts", *command)

    def _join(self, number: int, rate: str) -> _Holder:
        host = self._hold("--net", "--uts", "--ipc", "--pid", "--mount-proc")
        port = f"port{number}"
        end = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._inside(self._switch, "ip", "link", "add", port, *end)
        self._inside(self._switch, "ip", "link", "set", port, "master", "switch", "up")
        self._inside(host, "ip", "address", "add", f"{_NETWORK}.{number + 1}/24", "dev", "eth0")
        self._inside(host, "ip", "link", "set", "lo", "up")
        self._inside(host, "ip", "link", "set", "eth0", "up")
        self._inside(host, "hostname", f"host{number}")
        for holder, device in ((host, "eth0"), (self._switch, port)):
            shaper = ("tbf", "rate", rate, "burst", "256k", "latency", "20ms")
            self._inside(holder, "tc", "qdisc", "add", "dev", device, "root", *shaper)
        return host

    def rank(self, host: int, function: Callable[..., Any], rank: int, world_size: int, *given: Any) -> RankOfHost:
        """Starts ``function(rank, world_size, *given)`` on a host, in the default group of those ranks."""
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": f"{_NETWORK}.1", "MASTER_PORT": str(_PORT),
            "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent / "src")]), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        enter = ["nsenter", "--target", str(self._hosts[host].pid), "--net", "--uts", "--ipc", "--pid", "--mount"]
        call = json.dumps([function.__module__, function.__name__, list(given)])
        started = RankOfHost([*enter, sys.executable, "-u", "-m", "hosts.rank", call], environment)
        self._ranks.append(started)
        return started

    def unplug(self, host: int) -> None:
        """Takes the carrier from a host: nothing passes, and no connection is closed."""
        self._inside(self._switch, "ip", "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Puts the cable back."""
        self._inside(self._switch, "ip", "link", "set", f"port{host}", "up")

    def end(self) -> None:
        """Ends all that runs on the hosts, and the hosts."""
        for rank in self._ranks:
            rank.end()
        for holder in self._holders:
            holder.end()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
