"""What one host finds out by trying: connections, datagrams, ports, its speed. Plain sockets with time limits.

Never imports torch. Datagrams are sent with "do not fragment", in the size of the interface's MTU: where a hop takes
less, small messages pass and large ones vanish.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from unisono.topo.exchange import close, connect, listen, why
from unisono.topo.facts import Facts
from unisono.topo.links import LinkCost
from unisono.topo.survey import Survey, measured
from unisono.transport.process import OwnThread

__all__ = ["NAMING_SECONDS", "Probes", "echo_server", "endpoint_is_here", "holder", "master_stand_in", "probe"]

_T = TypeVar("_T")
_UDP_HEADERS = 28  # bytes of IP and UDP before a datagram's data
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: do not fragment, whatever was learnt of the path before
_SMALL = 64
_DATAGRAM_SECONDS, _DATAGRAM_TRIES = 0.4, 4
_SPEED_LOOPS, _SPEED_RUNS = 8_000_000, 4  # some 100 ms each: a short run may slip through between two pauses
NAMING_SECONDS = 3.0  # a packet that is lost costs 5, torch's stores wait for it
_LISTENING = "0A"  # proc(5): the state of a listening socket


@dataclass(frozen=True)
class Probes:
    """What one host has found.

    By the keys of the other hosts: ``links``, or why there is none, and ``datagrams`` of an MTU's size: ``passed``,
    ``vanished``, or why they can not be sent. ``master``: why the master port can not be reached, empty if it can;
    ``port_holder``: who has that port on its host, empty if it is free, and then ``free_port`` is another;
    ``endpoint_here``: torchrun takes this host for the one of its endpoint; ``seconds``: for a fixed computation;
    ``clock``: seconds since the epoch, read by all hosts at once; ``naming``: seconds that the resolver takes for the
    names of addresses, at most `NAMING_SECONDS`.
    """

    links: dict[str, LinkCost | str] = field(default_factory=dict)
    datagrams: dict[str, str] = field(default_factory=dict)
    master: str = ""
    port_holder: str = ""
    free_port: int = 0
    endpoint_here: bool | None = None
    seconds: float = 0.0
    clock: float = 0.0
    naming: float = 0.0

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Probes":
        """What `asdict` gave, through JSON."""
        links = {key: cost if isinstance(cost, str) else LinkCost(**cost) for key, cost in data["links"].items()}
        return cls(**{**data, "links": links})


def probe(found: Survey, echo_port: int, port_holder: str, endpoint: str) -> Probes:
    """Tries everything from this host to the others, to all of them at once; takes some seconds."""
    mine = found.mine
    echo_ports = found.exchange.gather("ready", echo_port)
    others = [each for each in found.others if each.key in echo_ports]
    clock, seconds = time.time() if len(others) == len(found.others) else 0.0, _speed()
    links = _at_once({each.key: partial(measured, each, found.ports[each.key]) for each in others})
    datagrams = _at_once({each.key: partial(_datagrams, mine, each, echo_ports[each.key]) for each in others})
    return Probes(
        links,
        datagrams,
        _reach_master(mine),
        port_holder,
        _free_port() if port_holder else 0,
        endpoint_is_here(endpoint) if endpoint else None,
        seconds,
        clock,
        _naming([each.towards or "127.0.0.1" for each in (mine, *others)]),
    )


def _at_once(calls: Mapping[str, Callable[[], _T]]) -> dict[str, _T]:
    """What the calls return, each made in a thread of its own."""
    with ThreadPool(max(1, len(calls))) as pool:
        return dict(zip(calls, pool.map(lambda call: call(), calls.values()), strict=True))


def _speed() -> float:
    """Seconds for a fixed computation, the least of some runs: the same program on every host."""
    times = []
    for _ in range(_SPEED_RUNS):
        begun = time.perf_counter()
        sum(range(_SPEED_LOOPS))
        times.append(time.perf_counter() - begun)
    return min(times)


def _naming(addresses: Sequence[str]) -> float:
    """Seconds for the names of addresses, as torch's stores ask for them: of IPv4, as sockets for IPv6 show it."""
    shown = {each if ":" in each else f"::ffff:{each}" for each in addresses}
    begun, threads = time.perf_counter(), []
    for each in shown:
        threads.append(OwnThread(target=_name_of, args=(each,), name="unisono asks for a name", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, begun + NAMING_SECONDS - time.perf_counter()))
    return time.perf_counter() - begun


def _name_of(address: str) -> None:
    with suppress(OSError):
        socket.getnameinfo((address, 0), socket.NI_NUMERICSERV)


def _reach_master(mine: Facts) -> str:
    address, port = (mine.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (mine.launcher and address and port.isdecimal()):
        return ""
    try:
        connect(address, int(port)).close()
    except OSError as error:
        return why(error)
    return ""


@contextmanager
def echo_server() -> Iterator[int]:
    """Answers datagrams on a free port, whose number it yields, with their length."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.bind(("", 0))

        def serve() -> None:
            with suppress(OSError):
                while True:
                    data, peer = door.recvfrom(1 << 16)
                    if not data:
                        return
                    with suppress(OSError):
                        door.sendto(str(len(data)).encode(), peer)

        OwnThread(target=serve, name="unisono answers datagrams", daemon=True).start()
        port: int = door.getsockname()[1]
        yield port
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", ("127.0.0.1", port))


def _datagrams(mine: Facts, peer: Facts, port: int) -> str:
    address = next((each for each in peer.addresses if ip_address(each).version == 4), "")
    if not address or mine.mtu <= _UDP_HEADERS:
        return "no IPv4 address"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.connect((address, port))
            channel.settimeout(_DATAGRAM_SECONDS)
            if not _echoed(channel, _SMALL):
                return "blocked"
            channel.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
            return "passed" if _echoed(channel, min(mine.mtu, 65_000) - _UDP_HEADERS) else "vanished"
    except OSError as error:
        return "vanished" if error.errno == errno.EMSGSIZE else why(error)


def _echoed(channel: socket.socket, nbytes: int) -> bool:
    for _ in range(_DATAGRAM_TRIES):
        channel.send(bytes(nbytes))
        with suppress(TimeoutError):
            return channel.recv(64) == str(nbytes).encode()
    return False


# Ports


@contextmanager
def master_stand_in(facts: Facts, here: bool) -> Iterator[str]:
    """Listens on the master port in rank 0's place, if ``here`` is its host and the port is free; yields who has it.

    Under torchrun its agent serves the port already.
    """
    port = facts.variables.get("MASTER_PORT", "")
    with ExitStack() as ends:
        taken = ""
        if here and port.isdecimal() and facts.variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            try:
                door = listen(int(port))
                ends.callback(close, door)
            except OSError as error:
                taken = holder(int(port)) if error.errno == errno.EADDRINUSE else why(error)
        yield taken


def _free_port() -> int:
    with listen() as door:
        port: int = door.getsockname()[1]
        return port


def holder(port: int) -> str:
    """Which process listens on a port of this host, as far as that may be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {process.name} ({command[:80]})"
    return "a process of another user or container"


# torchrun's endpoint


def endpoint_is_here(endpoint: str) -> bool:
    """True if torchrun's c10d rendezvous serves its store on this host for an endpoint, ``HOST`` or ``HOST:PORT``.

    As torch decides where ``is_host`` is not given: by the name, and by the addresses that the own name stands for.
    """
    host = endpoint.rpartition(":")[0] if endpoint.rpartition(":")[2].isdecimal() and ":" in endpoint else endpoint
    own = socket.gethostname()
    if host in ("localhost", own):
        return True
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return True
    try:
        theirs = {each[4][0] for each in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
        found = socket.getaddrinfo(own, None, proto=socket.IPPROTO_TCP, flags=socket.AI_CANONNAME)
    except OSError:
        return False
    return any(each[3] == host or each[4][0] in theirs for each in found)
