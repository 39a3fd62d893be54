"""Topology: hosts times ranks, and what a message between two of them costs.

A message of s bytes over a link takes alpha + s * beta seconds; reducing s bytes takes s * gamma seconds. Every rank
has one full-duplex port inside its host, and every host `nics` full-duplex ports to the outside, which its ranks share
by local index. On a switch, messages contend for the ports at both ends; point-to-point, for the wire between the pair.
Hosts may have any ranks (schedule/hosts.py), and links of their own between each pair, as measured at a group's birth.

The presets carry round numbers of the right order for hardware of the day, meant for comparing algorithms. Latencies of
nvlink and infiniband are the ones NCCL's tuner publishes for its LL protocol; `unisono tune` measures a real machine.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import UsageError, check_known
from unisono.schedule.hosts import Hosts, as_hosts, show_hosts
from unisono.units import show_ranks

__all__ = ["LINKS", "PRESETS", "Link", "Memory", "Topology", "cluster", "joined", "preset"]

PRESETS = ("shared_memory", "pcie", "nvlink", "infiniband", "ethernet", "cluster")


@dataclass(frozen=True)
class Link:
    """alpha in seconds per message, beta in seconds per byte; `switched` or point-to-point wires.

    alpha is what a message costs whose both ends are posted at once. The part `announcement` of it tells the sender
    that the receive is posted: it is spent already where that was done as long before. `further` is what every other
    message of a rank at the same time costs it. Raises UsageError if a cost is negative, or the announcement more than
    alpha.
    """

    name: str
    alpha: float
    beta: float
    switched: bool = True
    announcement: float = 0.0
    further: float = 0.0

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta, self.further) < 0:
            raise UsageError(f"link {self.name} cannot have negative costs, got alpha={self.alpha}, beta={self.beta}")
        if not 0 <= self.announcement <= self.alpha:
            raise UsageError(f"link {self.name}: the announcement, {self.announcement}, is no part of {self.alpha}")


@dataclass(frozen=True)
class Memory:
    """Shared memory inside every host: seconds per call, per meeting and per byte copied; cores of a host.

    `cold`: seconds per byte of calls that move too much for caches (simulation/memory.py); 0: as others. Raises
    UsageError if a number is negative, or there is no core.
    """

    call: float
    meeting: float
    copy: float
    cores: int = 1
    cold: float = 0.0

    def __post_init__(self) -> None:
        if min(self.call, self.meeting, self.copy, self.cold) < 0 or self.cores < 1:
            raise UsageError(f"shared memory needs a core and no negative costs, got {self}")


LINKS = {
    "shared_memory": Link("shared_memory", 1e-6, 1 / 10e9),
    "pcie": Link("pcie", 1.0e-6, 1 / 25e9),
    "nvlink": Link("nvlink", 0.6e-6, 1 / 400e9),
    "infiniband": Link("infiniband", 2.7e-6, 1 / 50e9),
    "ethernet": Link("ethernet", 25e-6, 1 / 1.25e9),
}
_GAMMA = {"shared_memory": 1 / 10e9, "ethernet": 1 / 10e9}
_GPU_GAMMA = 1 / 1e12


@dataclass(frozen=True)
class Topology:
    """hosts x ranks_per_host ranks; `intra` joins the ranks of a host, `inter` the hosts; gamma in seconds per byte.

    Rank r lives on host r // ranks_per_host, unless `cut` gives the ranks of each host: then ranks_per_host is the most
    of any. `between`, by host of the sender and host of the receiver, replaces `inter`. `memory` says what shared
    memory costs, where the ranks of a host meet in place of sending messages. Ids from world_size on are switches:
    reached over `inter` where there are several hosts, and never short of ports. Raises UsageError if a number is out
    of range or `inter` is missing.
    """

    name: str
    hosts: int
    ranks_per_host: int
    intra: Link
    inter: Link | None = None
    gamma: float = 0.0
    nics: int = 1
    cut: Hosts = ()
    between: tuple[tuple[Link, ...], ...] = ()
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise UsageError(f"topology {self.name} cannot have negative costs, got gamma={self.gamma}")
        if min(self.hosts, self.ranks_per_host, self.nics) < 1:
            raise UsageError(
                f"a topology needs at least 1 host, rank per host and NIC, got {self.hosts} hosts, "
                f"{self.ranks_per_host} ranks per host, {self.nics} NICs"
            )
        if self.hosts > 1 and self.inter is None:
            raise UsageError(f"topology {self.name} has {self.hosts} hosts and no link between them: give `inter`")
        if self.cut and (len(self.cut), max(map(len, self.cut))) != (self.hosts, self.ranks_per_host):
            raise UsageError(f"topology {self.name} has {self.hosts} hosts, but its cut is {show_hosts(self.cut)}")
        if self.between and [len(row) for row in self.between] != [self.hosts] * self.hosts:
            raise UsageError(f"topology {self.name} needs {self.hosts} x {self.hosts} links between its hosts")

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.cut)) if self.cut else self.hosts * self.ranks_per_host

    @cached_property
    def ranks_of_hosts(self) -> Hosts:
        """The ranks of every host."""
        return self.cut or as_hosts(self.hosts, self.world_size)

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The host of every rank, and its number there."""
        host, number = np.zeros((2, self.world_size), dtype=np.int64)
        for which, ranks in enumerate(self.cut):
            host[list(ranks)], number[list(ranks)] = which, np.arange(len(ranks))
        if not self.cut:
            host, number = np.divmod(np.arange(self.world_size), self.ranks_per_host)
        return host, number

    def host(self, rank: ArrayLike) -> NDArray[np.int64]:
        """The host of each rank (switches: -1)."""
        ranks = np.asarray(rank, dtype=np.int64)
        return np.where(ranks < self.world_size, self._places[0][np.minimum(ranks, self.world_size - 1)], -1)

    def outside(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.bool_]:
        """True if a message leaves its host."""
        return np.asarray(self.host(src) != self.host(dst)) & (self.hosts > 1)

    def link(self, src: int, dst: int) -> Link:
        """The link that a message from src to dst takes."""
        if self.inter is None or not bool(self.outside(src, dst)):
            return self.intra
        a, b = int(self.host(src)), int(self.host(dst))
        return self.between[a][b] if self.between and min(a, b) >= 0 else self.inter

    def alpha(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.float64]:
        """Seconds per message from src to dst, elementwise."""
        return self._costs(src, dst, "alpha")

    def beta(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.float64]:
        """Seconds per byte from src to dst, elementwise."""
        return self._costs(src, dst, "beta")

    def _costs(self, src: ArrayLike, dst: ArrayLike, cost: str) -> NDArray[np.float64]:
        far: float | NDArray[np.float64] = getattr(self.inter or self.intra, cost)
        if self.between:
            a, b = self.host(src), self.host(dst)
            by_hosts = np.array([[getattr(link, cost) for link in row] for row in self.between])
            far = np.where((a < 0) | (b < 0), far, by_hosts[a, b])
        return np.where(self.outside(src, dst), far, getattr(self.intra, cost))

    def ports(self, src: ArrayLike, dst: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The port each message leaves by and the one it arrives at (-1: never contended), elementwise, int64.

        Every port sends and receives at once, so contention is per port and direction. On a point-to-point link both
        are the id of the wire. Ids are those of ranks, then of NICs, then of wires, one per ordered pair.
        """
        s, d = np.broadcast_arrays(np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64))
        far = self.outside(s, d)
        out, into = np.where(far, self._nic(s), s), np.where(far, self._nic(d), d)
        wired = np.where(far, not (self.inter or self.intra).switched, not self.intra.switched)
        wire = self.world_size + self.hosts * self.nics + s * self.world_size + d
        out, into = np.where(wired, wire, out), np.where(wired, wire, into)
        return np.where(s < self.world_size, out, -1), np.where(d < self.world_size, into, -1)

    def _nic(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        host, number = (places[np.minimum(rank, self.world_size - 1)] for places in self._places)
        return self.world_size + host * self.nics + number * self.nics // self.ranks_per_host

    def describe(self) -> str:
        """One line in words."""
        ranks = f"{show_hosts(self.cut)} ranks" if self.cut else show_ranks(self.ranks_per_host)
        inner = f"{ranks} over {_words(self.intra)}"
        if self.inter is None or self.hosts == 1:
            return f"{self.name}: {inner}"
        return f"{self.name}: {self.hosts} hosts of {inner}, joined by {self.nics} x {_words(self.inter)}"


def preset(name: str | Topology, world_size: int) -> Topology:
    """A topology by name: one host for shared_memory, pcie and nvlink; one rank per host for infiniband and ethernet.

    "cluster" has hosts of 8 ranks (of the largest divisor of world_size up to 8). A topology is returned as it is.
    Raises UsageError for other names.
    """
    if isinstance(name, Topology):
        return name
    check_known("topology", name, PRESETS)
    if world_size < 1:
        raise UsageError(f"a topology needs at least 1 rank, got {world_size}")
    if name == "cluster":
        ranks_per_host = max(g for g in range(1, 9) if world_size % g == 0)
        return cluster(world_size // ranks_per_host, ranks_per_host)
    gamma = _GAMMA.get(name, _GPU_GAMMA)
    if name in ("infiniband", "ethernet"):
        return Topology(name, world_size, 1, LINKS[name], LINKS[name], gamma)
    return Topology(name, 1, world_size, LINKS[name], None, gamma)


def joined(
    hosts: Hosts,
    intra: Link,
    between: tuple[tuple[Link, ...], ...] = (),
    gamma: float = 0.0,
    memory: Memory | None = None,
    name: str = "measured",
) -> Topology:
    """Any hosts, with links between each pair (``between[h][h]`` is not looked at) and one NIC per host.

    Raises UsageError if there are several hosts and no links.
    """
    pairs = [link for a, row in enumerate(between) for b, link in enumerate(row) if a != b]
    inter = max(pairs, key=lambda link: (link.alpha, link.beta), default=None)
    most = max(map(len, hosts))
    return Topology(name, len(hosts), most, intra, inter, gamma, 1, hosts, between, memory)


def cluster(hosts: int, ranks_per_host: int, nics: int | None = None) -> Topology:
    """Hosts with NVLink inside and InfiniBand outside, by default one NIC per rank."""
    whole = Topology("cluster", hosts, ranks_per_host, LINKS["nvlink"], LINKS["infiniband"], _GPU_GAMMA)
    return replace(whole, nics=nics if nics is not None else ranks_per_host)


def _words(link: Link) -> str:
    shape = "switched" if link.switched else "point-to-point"
    rate = f"{1e-9 / link.beta:g} GB/s" if link.beta else "no limit"
    return f"{link.name} ({link.alpha * 1e6:g} µs, {rate}, {shape})"
