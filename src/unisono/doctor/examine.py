"""One run of the doctor on this host, together with those on the others: what was found, and what is right.

The causes that are looked for are those that public reports of PyTorch, NCCL and Horovod name most. A check reads what
all hosts have found and yields findings, each with the remedy for the host that has it; where it yields none, its other
function says what is right.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from unisono.backend.launchers import launched, master_address
from unisono.doctor import host_causes as host
from unisono.doctor import network_causes as network
from unisono.doctor.diagnosis import Diagnosis, Finding, listed, span
from unisono.doctor.probes import Probes, echo_server, master_stand_in, probe
from unisono.topo.survey import is_here, survey
from unisono.units import show_nbytes

__all__ = ["CAUSES", "Cause", "Report", "examine"]


class Cause(NamedTuple):
    """A name, what looks for it, and what is right where it finds nothing; ``between``: it takes several hosts."""

    name: str
    between: bool
    find: Callable[[Diagnosis], Iterator[Finding]]
    right: Callable[[Diagnosis], str]


CAUSES = [
    Cause(
        "ranks",
        False,
        host.ranks,
        lambda d: listed(d, lambda each: f"({span(each)})" if d.mine.launcher else "is there"),
    ),
    Cause("own name", True, network.own_name, lambda d: listed(d, lambda each: f"is {', '.join(each.own_name)}")),
    Cause("resolver", False, network.resolver, lambda d: "answers in time"),
    Cause(
        "interface",
        True,
        network.interface,
        lambda d: listed(d, lambda each: f"{each.towards_interface} ({each.towards})"),
    ),
    Cause("master address", True, network.master, lambda d: f"{d.mine.master} is reached by all"),
    Cause("open ports", True, network.open_ports, lambda d: "every host reaches every other one"),
    Cause("master port", False, network.master_port, lambda d: d.mine.variables.get("MASTER_PORT", "not given")),
    Cause("endpoint", True, network.endpoint, lambda d: f"{d.endpoint} is of one host" if d.endpoint else "not given"),
    Cause("versions", False, host.versions, lambda d: ", ".join(f"{k} {v}" for k, v in d.mine.versions.items())),
    Cause("/dev/shm", False, host.shm, lambda d: listed(d, lambda each: show_nbytes(each.shm))),
    Cause("MTU", True, host.mtu, lambda d: listed(d, lambda each: str(each.mtu))),
    Cause("slow host", False, host.slow, lambda d: listed(d, lambda each: f"{each.usable_cores:g} cores")),
    Cause("limits", False, host.limits, lambda d: listed(d, lambda each: f"{each.nofile} files")),
    Cause("clocks", True, host.clocks, lambda d: "within a second of each other"),
]
"""In the order of the report."""


@dataclass(frozen=True)
class Report:
    """``right``: causes that were looked for and not found, with the values that show it.

    ``speaks``: this process is the one that prints, where a launcher has started one on every host.
    """

    diagnosis: Diagnosis
    findings: list[Finding]
    right: list[tuple[str, str]]
    speaks: bool

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        d = self.diagnosis
        return {
            "hosts": [{"name": d.name(each), **asdict(each)} for each in d.hosts],
            "probes": {d.names[key]: _by_name(asdict(each), d.names) for key, each in d.probes.items()},
            "findings": [finding._asdict() for finding in self.findings],
            "right": dict(self.right),
        }


def _by_name(data: dict[str, Any], names: dict[str, str] | Any) -> dict[str, Any]:
    inner = {name: {names[key]: each for key, each in data[name].items()} for name in ("links", "datagrams")}
    return {**data, **inner}


def examine(peers: Sequence[str], port: int, seconds: float, endpoint: str) -> Report | None:
    """Looks for all causes; None for a process that leaves it to the first of its host.

    ``peers``: addresses of hosts where the same runs, without a launcher. ``endpoint``: torchrun's ``--rdzv-endpoint``.
    Raises `UsageError`, see `survey`.
    """
    place = launched()
    if place is not None and place.local_rank:
        master_address(place)  # which may take all ranks
        return None
    with survey(place, peers, port, seconds) as found:
        mine = found.mine
        here = place is not None and is_here(mine.master)
        with echo_server() as echo_port, master_stand_in(mine, here) as port_holder:
            own = probe(found, echo_port, port_holder, endpoint)
            reported = found.exchange.gather("probes", asdict(own))
        probes = {key: Probes.from_data(data) for key, data in reported.items()}
        d = Diagnosis(
            mine,
            found.hosts,
            found.names(),
            probes,
            found.failures,
            found.absent,
            found.expected,
            seconds,
            endpoint,
            port,
        )
    findings = {cause.name: list(cause.find(d)) for cause in CAUSES}
    shown = [cause for cause in CAUSES if d.several or not cause.between]
    right = [(cause.name, cause.right(d)) for cause in shown if not findings[cause.name]]
    speaks = bool(peers) or found.hosts[0].key == mine.key
    return Report(d, [finding for each in findings.values() for finding in each], right, speaks)
