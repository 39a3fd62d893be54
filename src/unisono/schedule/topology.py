"""Topology: hosts times ranks, and what a message between two of them costs.

A message of s bytes over a link takes alpha + s * beta seconds; reducing s bytes takes s * gamma seconds. Every rank
has one full-duplex port inside its host, and every host `nics` full-duplex ports to the outside, which its ranks share
by local index. On a switch, messages contend for the ports at both ends; point-to-point, for the wire between the pair.

The presets carry round numbers of the right order for hardware of the day, meant for comparing algorithms. Latencies of
nvlink and infiniband are the ones NCCL's tuner publishes for its LL protocol; `unisono tune` measures a real machine.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import UsageError

__all__ = ["LINKS", "PRESETS", "Link", "Topology", "cluster", "preset"]

PRESETS = ("shared_memory", "pcie", "nvlink", "infiniband", "ethernet", "cluster")


@dataclass(frozen=True)
class Link:
    """alpha in seconds per message, beta in seconds per byte; `switched` or point-to-point wires.

    Raises UsageError if a cost is negative.
    """

    name: str
    alpha: float
    beta: float
    switched: bool = True

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise UsageError(f"link {self.name} cannot have negative costs, got alpha={self.alpha}, beta={self.beta}")


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

    Rank r lives on host r // ranks_per_host. Ids from world_size on are switches: reached over `inter` where there are
    several hosts, and never short of ports. Raises UsageError if a number is out of range or `inter` is missing.
    """

    name: str
    hosts: int
    ranks_per_host: int
    intra: Link
    inter: Link | None = None
    gamma: float = 0.0
    nics: int = 1

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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    def host(self, rank: ArrayLike) -> NDArray[np.int64]:
        """The host of each rank (switches: -1)."""
        ranks = np.asarray(rank, dtype=np.int64)
        return np.where(ranks < self.world_size, ranks // self.ranks_per_host, -1)

    def outside(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.bool_]:
        """True if a message leaves its host."""
        return np.asarray(self.host(src) != self.host(dst)) & (self.hosts > 1)

    def link(self, src: int, dst: int) -> Link:
        """The link that a message from src to dst takes."""
        return self.inter if self.inter is not None and bool(self.outside(src, dst)) else self.intra

    def alpha(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.float64]:
        """Seconds per message from src to dst, elementwise."""
        far = self.inter or self.intra
        return np.where(self.outside(src, dst), far.alpha, self.intra.alpha)

    def beta(self, src: ArrayLike, dst: ArrayLike) -> NDArray[np.float64]:
        """Seconds per byte from src to dst, elementwise."""
        far = self.inter or self.intra
        return np.where(self.outside(src, dst), far.beta, self.intra.beta)

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
        local = rank % self.ranks_per_host
        return self.world_size + rank // self.ranks_per_host * self.nics + local * self.nics // self.ranks_per_host

    def describe(self) -> str:
        """One line in words."""
        inner = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)} over {_words(self.intra)}"
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
    if name not in PRESETS:
        raise UsageError(f"unknown topology {name!r}: expected one of {', '.join(PRESETS)}")
    if world_size < 1:
        raise UsageError(f"a topology needs at least 1 rank, got {world_size}")
    if name == "cluster":
        ranks_per_host = max(g for g in range(1, 9) if world_size % g == 0)
        return cluster(world_size // ranks_per_host, ranks_per_host)
    gamma = _GAMMA.get(name, _GPU_GAMMA)
    if name in ("infiniband", "ethernet"):
        return Topology(name, world_size, 1, LINKS[name], LINKS[name], gamma)
    return Topology(name, 1, world_size, LINKS[name], None, gamma)


def cluster(hosts: int, ranks_per_host: int, nics: int | None = None) -> Topology:
    """Hosts with NVLink inside and InfiniBand outside, by default one NIC per rank."""
    whole = Topology("cluster", hosts, ranks_per_host, LINKS["nvlink"], LINKS["infiniband"], _GPU_GAMMA)
    return replace(whole, nics=nics if nics is not None else ranks_per_host)


def _words(link: Link) -> str:
    shape = "switched" if link.switched else "point-to-point"
    rate = f"{1e-9 / link.beta:g} GB/s" if link.beta else "no limit"
    return f"{link.name} ({link.alpha * 1e6:g} µs, {rate}, {shape})"
