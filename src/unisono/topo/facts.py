"""Facts of one host that any user may read, in a container too. Never imports torch.

Sources: sysfs (Documentation/ABI), proc(5), cgroups(7), tcp(7); nvidia-smi where there are GPUs.
"""

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unisono.backend.launchers import RankPlace, launched
from unisono.transport.host import Host
from unisono.transport.interfaces import address_towards, interface_of, interfaces

__all__ = ["Facts", "InterfaceFacts", "host_facts", "resolve"]

_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"
)  # fmt: skip
"""Environment variables that decide where ranks meet and over what they talk."""
_PACKAGES = ("unisono", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_CPUS, _NODES, _NET, _IB = (
    Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node"), Path("/sys/class/net"),
    Path("/sys/class/infiniband"),
)  # fmt: skip
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_SECONDS = 10


@dataclass(frozen=True)
class InterfaceFacts:
    """One network interface; ``speed`` in Mbit/s as the driver claims it, 0 if it does not. Virtual ones invent it."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    speed: int
    state: str
    loopback: bool


@dataclass(frozen=True)
class Facts:
    """One host. Sizes in bytes, -1 for no limit; ``quota`` in cores, 0 for none; ``towards``: the own address used
    to reach the peer of the same place, empty where no route leads there."""

    hostname: str
    boot: str
    pid: int
    rank: int
    world_size: int
    local_world_size: int
    launcher: str
    own_name: tuple[str, ...]
    master: str
    master_addresses: tuple[str, ...]
    towards: str
    towards_interface: str
    variables: dict[str, str]
    versions: dict[str, str]
    cores: int
    allowed_cores: int
    quota: float
    numa: dict[str, str]
    caches: dict[str, list[str]]
    memory: int
    memory_limit: int
    shm: int
    memlock: int
    nofile: int
    congestion: str
    interfaces: tuple[InterfaceFacts, ...]
    gpus: tuple[str, ...]
    gpu_links: str
    infiniband: dict[str, str]

    @property
    def key(self) -> str:
        """Tells this process's facts from those of others."""
        return f"{self.hostname}/{self.boot}/{self.rank}/{self.pid}"

    @property
    def addresses(self) -> list[str]:
        """Where peers may reach this host: the address on the way to them first."""
        usable = [a for each in self.interfaces if not each.loopback and each.state != "down" for a in each.addresses]
        return sorted(usable, key=lambda address: address != self.towards)

    @property
    def mtu(self) -> int:
        """Of the interface on the way to the peers; 0 if it is not known."""
        return next((each.mtu for each in self.interfaces if each.name == self.towards_interface), 0)

    @property
    def usable_cores(self) -> float:
        """Those that the affinity and the container leave."""
        return min(self.allowed_cores, self.quota or self.allowed_cores)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Facts":
        """The facts in what `asdict` gave, through JSON; raises `TypeError` for anything else."""
        tuples = {name: tuple(data[name]) for name in ("own_name", "master_addresses", "gpus") if name in data}
        listed = [{**each, "addresses": tuple(each["addresses"])} for each in data.get("interfaces", ())]
        return cls(**{**data, **tuples, "interfaces": tuple(InterfaceFacts(**each) for each in listed)})


def host_facts(master: str, place: RankPlace | None = None) -> Facts:
    """This host's facts; ``master`` is the name or address under which the ranks, or the peer, are to be found."""
    place = place or launched() or RankPlace("", 0, 1, 0, 1)
    towards = ""
    with suppress(OSError):
        towards = address_towards(master)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Facts(
        hostname=socket.gethostname(),
        boot=Host.mine().boot,
        pid=os.getpid(),
        rank=place.rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        launcher=place.launcher,
        own_name=resolve(socket.gethostname()),
        master=master,
        master_addresses=resolve(master),
        towards=towards,
        towards_interface=interface_of(towards) if towards else "",
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        versions=_versions(),
        cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0)),
        quota=_quota(),
        numa={node.name: _text(node / "cpulist") for node in sorted(_NODES.glob("node[0-9]*"))},
        caches=_caches(),
        memory=memory,
        memory_limit=_memory_limit(memory),
        shm=_shm(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        congestion=_congestion(),
        interfaces=tuple(_interfaces()),
        gpus=tuple(_nvidia("--query-gpu=index,name,memory.total", "--format=csv,noheader").splitlines()),
        gpu_links=_nvidia("topo", "-m"),
        infiniband=_infiniband(),
    )


def resolve(name: str) -> tuple[str, ...]:
    """The addresses that a name stands for on this host; none if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def _text(path: Path) -> str:
    """What a file of /sys or /proc says; empty if it is not there or has no answer."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.lstrip("-").isdecimal() else otherwise


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package.rpartition("-cu")[0].removeprefix("nvidia-") or package] = version(package)
    return found


def _interfaces() -> Iterator[InterfaceFacts]:
    for each in interfaces():
        folder = _NET / each.name
        speed = max(0, _number(_text(folder / "speed"), 0))
        state = _text(folder / "operstate") if each.up else "down"
        yield InterfaceFacts(
            each.name, each.addresses, _number(_text(folder / "mtu"), 0), speed, state or "unknown", each.loopback
        )


def _own_cgroups(controller: str) -> Iterator[Path]:
    """This process's groups that limit it, of cgroup v2 or of a controller of v1, from the inmost on."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _CGROUP / controller if controllers else _CGROUP
            inmost = root / path.lstrip("/")
            groups = [inmost, *inmost.parents]
            yield from groups[: groups.index(root) + 1]


def _quota() -> float:
    """The least number of cores' time that a group of this process may use; 0 if none limits it."""
    found = []
    for group in _own_cgroups("cpu"):
        texts = _text(group / "cpu.max").split()  # "max 100000"
        texts = texts or [_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")]
        limit, period = _number(texts[0], 0), _number(texts[1], 0)
        if limit > 0 and period > 0:
            found.append(limit / period)
    return min(found, default=0.0)


def _memory_limit(memory: int) -> int:
    found = []
    for group in _own_cgroups("memory"):
        text = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
        found.append(_number(text, memory))
    least = min(found, default=memory)
    return least if least < memory else -1


def _shm() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _congestion() -> str:
    with suppress(OSError), socket.socket() as probe:
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
    return ""


def _caches() -> dict[str, list[str]]:
    """Each cache above the first level, ``L3 32768K``: the lists of cores that share one."""
    found: dict[str, list[str]] = {}
    for index in sorted(_CPUS.glob("cpu[0-9]*/cache/index*")):
        level, size = _text(index / "level"), _text(index / "size")
        sharing = found.setdefault(f"L{level} {size}", [])
        if level not in ("", "1") and (cores := _text(index / "shared_cpu_list")) not in sharing:
            sharing.append(cores)
    return {name: sharing for name, sharing in sorted(found.items()) if sharing}


def _infiniband() -> dict[str, str]:
    """State, rate and link layer of each port."""
    return {
        f"{port.parts[-3]} port {port.name}": ", ".join(_text(port / name) for name in ("state", "rate", "link_layer"))
        for port in sorted(_IB.glob("*/ports/*"))
    }


def _nvidia(*arguments: str) -> str:
    """What nvidia-smi prints; empty where it is not installed or has nothing to say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_NVIDIA_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
