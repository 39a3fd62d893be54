"""A host: the namespaces in which ranks can map each other's memory and see each other's processes.

Both go through ``/proc`` (segment.py, peer_mappings.py, process.py), by pid. So two containers of one machine are two
hosts, though they share a kernel, unless they share its PID namespace; and so are two user namespaces, and two users,
who may not open each other's memory. Ranks of two hosts meet over the network. IPC, mount and network namespaces make
no difference: the memory has no name.
"""

import hashlib
import os
import socket
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from unisono.transport.interfaces import address_for_peers
from unisono.transport.process import Identity, cores

__all__ = ["Host", "HostMap", "Place", "barred", "own_mark", "unseen"]


class Host(NamedTuple):
    """One host, as its processes publish it; equal for two of them if they can share memory."""

    boot: str  # names the kernel until its next boot
    pid_namespace: int
    user_namespace: int
    user: int

    @classmethod
    def mine(cls) -> "Host":
        """That of this process, which may change with its user."""
        return cls(_boot_id(), _namespace("pid"), _namespace("user"), os.geteuid())

    @classmethod
    def from_text(cls, text: str) -> "Host":
        """The host described by `to_text`."""
        boot, *numbers = text.split("/")
        return cls(boot, *map(int, numbers))

    def to_text(self) -> str:
        """In one word."""
        return "/".join(map(str, self))

    def sees(self, other: "Host") -> bool:
        """True if processes there can be looked up by their pids here, be they another user's."""
        return self[:2] == other[:2]


class Place(NamedTuple):
    """Where a rank runs: its `Host` as text, the host's name, its address there, its pid, the cores of the host.

    ``started``: the start time of the process (`Identity`), 0 if that is not known.
    """

    host: str
    hostname: str
    address: str
    pid: int
    cores: int
    started: int = 0

    def who(self, name: int) -> str:
        """The rank, of global rank ``name``, in words."""
        return f"rank {name} (pid {self.pid} on {self.hostname})"

    @classmethod
    def mine(cls, towards: str) -> "Place":
        """That of this process; ``towards``: see `address_for_peers`."""
        own, here = Identity.mine(), address_for_peers(towards)
        return cls(Host.mine().to_text(), socket.gethostname(), here, own.pid, cores(), own.started)

    @property
    def process(self) -> Identity:
        """The process, as another host knows it."""
        return Identity(self.pid, self.started, _mark(self.host))


def _mark(host: str) -> int:
    """A digest of a `Host` in text: 63 bits, not 0."""
    return int.from_bytes(hashlib.blake2b(host.encode(), digest_size=8).digest()) >> 1 or 1


def own_mark() -> int:
    """The mark of this host in an `Identity` that another one has."""
    return _mark(Host.mine().to_text())


class HostMap:
    """The hosts of a group as seen by ``rank``: ``hosts[h]`` are the group ranks of host h, in order of the lowest."""

    def __init__(self, places: Sequence[Place], rank: int) -> None:
        found: dict[str, list[int]] = {}
        for each, place in enumerate(places):
            found.setdefault(place.host, []).append(each)
        self.places, self.rank = list(places), rank
        self.hosts = list(found.values())
        self.of = [next(h for h, ranks in enumerate(self.hosts) if each in ranks) for each in range(len(places))]
        self.mine = self.of[rank]
        self.local = self.hosts[self.mine]
        self.remote = [each for each in range(len(places)) if self.of[each] != self.mine]

    @property
    def oversubscribed(self) -> bool:
        """True if the ranks outnumber the cores on any host."""
        return any(len(ranks) > self.places[ranks[0]].cores for ranks in self.hosts)

    def receiver(self, host: int, other: int) -> int:
        """The rank of ``host`` that receives, for all of it, the frames of the ranks of ``other`` in collectives."""
        return self.hosts[host][other % len(self.hosts[host])]

    def proxy(self, rank: int, host: int) -> int:
        """The rank of a host that receives, for all of it, what ``rank`` of another host sends besides frames."""
        ranks = self.hosts[host]
        return ranks[self.hosts[self.of[rank]].index(rank) % len(ranks)]

    @property
    def counterparts(self) -> list[int]:
        """The ranks of other hosts that this rank sends to, or receives from, in collectives."""
        found = set(self.proxied)
        for host in range(len(self.hosts)):
            if host != self.mine:
                found |= {self.proxy(self.rank, host), self.receiver(host, self.mine)}
                if self.receiver(self.mine, host) == self.rank:
                    found.update(self.hosts[host])
        return sorted(found)

    @property
    def proxied(self) -> list[int]:
        """The ranks of other hosts whose proxy this rank is."""
        return [each for each in self.remote if self.proxy(each, self.mine) == self.rank]


@cache
def _boot_id() -> str:
    """Equal for two processes exactly if they share the kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _namespace(kind: str) -> int:
    """Names the namespace of a kind that this process is in; 0 where the kernel has none of that kind."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except FileNotFoundError:
        return 0


def unseen() -> str:
    """Why this process can not be found by its pid, and what to do; nothing if it can."""
    try:
        shown = os.readlink("/proc/self")
    except FileNotFoundError:
        shown = ""
    if shown == str(os.getpid()):
        return ""
    return (
        f"can not be found by its peers: /proc shows another PID namespace, or none (pid {os.getpid()} is "
        f"{shown or 'not there'}); mount its own there (unshare --mount-proc), or stay in the namespace of /proc"
    )


def barred(pid: int) -> str:
    """Why this process may not open the memory of a process of its user, and what to do."""
    try:
        mine, theirs = _credentials("self"), _credentials(str(pid))
    except (OSError, KeyError, IndexError):
        return "the kernel forbids it"
    for kind in ("Uid", "Gid"):
        used = mine[kind][3]  # for files
        if {used} != set(theirs[kind][:3]):
            ids = "/".join(theirs[kind][:3])
            return (
                f"its {kind.lower()} (real/effective/saved) is {ids}, not {used}; run all ranks as one user and group"
            )
    if int(theirs["CapPrm"][0], 16) & ~int(mine["CapEff"][0], 16):
        return "it has capabilities that this rank lacks; give all ranks the same"
    return (
        "it is not dumpable (prctl PR_SET_DUMPABLE 0, or its user was changed without an exec), or a security module "
        "forbids it; call prctl(PR_SET_DUMPABLE, 1) there"
    )


def _credentials(pid: str) -> dict[str, list[str]]:
    """The kernel's lines on a process: user and group ids, capabilities."""
    with open(f"/proc/{pid}/status") as file:
        return {name: rest.split() for name, _, rest in (line.partition(":") for line in file)}
