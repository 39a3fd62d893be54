"""What the hosts have found together, and a finding. Never imports torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from unisono.doctor.probes import Probes
from unisono.topo.facts import Facts
from unisono.units import name_ranks

__all__ = ["IFNAMES", "Diagnosis", "Finding", "listed", "loopback", "span", "use"]

IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Finding(NamedTuple):
    """One cause on one host; ``host`` is empty where it is no single one's."""

    cause: str
    host: str
    words: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """What all hosts have found.

    ``failures``: servers that this host could not reach; ``absent``: how many ranks, or hosts, of ``expected`` have not
    come within ``seconds``; ``endpoint``: torchrun's, if it is used; ``port``: where the hosts exchange this.
    """

    mine: Facts
    hosts: Sequence[Facts]
    names: Mapping[str, str]
    probes: Mapping[str, Probes]
    failures: Mapping[str, str]
    absent: int
    expected: int
    seconds: float
    endpoint: str
    port: int

    @property
    def several(self) -> bool:
        """True if the job is to run on more than this host."""
        return len(self.hosts) > 1 or self.absent > 0

    def name(self, host: Facts) -> str:
        """What to call a host."""
        return self.names[host.key]

    def tried(self) -> Iterator[tuple[Facts, Probes]]:
        """The hosts that have reported what they tried."""
        return ((each, self.probes[each.key]) for each in self.hosts if each.key in self.probes)


def loopback(addresses: Sequence[str]) -> bool:
    """True if all are addresses of a host towards itself."""
    return all(ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def listed(d: Diagnosis, words: Callable[[Facts], str]) -> str:
    """Words on every host, by comma."""
    return ", ".join(f"{d.name(each)} {words(each)}".strip() for each in d.hosts)


def use(host: Facts) -> str:
    """The variables that make both libraries take the interface towards the peers."""
    name = host.towards_interface or next((each.name for each in host.interfaces if not each.loopback), "eth0")
    return " ".join(f"{variable}={name}" for variable in IFNAMES)


def span(host: Facts) -> str:
    """The ranks of a host."""
    return name_ranks(list(range(host.rank, host.rank + host.local_world_size)))
