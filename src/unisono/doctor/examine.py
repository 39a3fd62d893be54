"""One run of the doctor on this host, together with those on the others: what was found, and what is right."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.backend.launchers import launched, master_address
from unisono.doctor.causes import CAUSES, Diagnosis, Finding
from unisono.doctor.probes import Probes, echo_server, master_stand_in, probe
from unisono.topo.survey import is_here, survey

__all__ = ["Report", "examine"]


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
        d, names = self.diagnosis, self.diagnosis.names()
        probes = {}
        for key, each in d.probes.items():
            data = asdict(each)
            by_name = {what: {names[to]: cost for to, cost in data[what].items()} for what in ("links", "datagrams")}
            probes[names[key]] = data | by_name
        return {
            "hosts": [{"name": d.name(each), **asdict(each)} for each in d.hosts],
            "probes": probes,
            "findings": [finding._asdict() for finding in self.findings],
            "right": dict(self.right),
        }


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
        d = Diagnosis(**vars(found), probes=probes, endpoint=endpoint)
    findings = {cause.name: list(cause.find(d)) for cause in CAUSES}
    shown = [cause for cause in CAUSES if d.several or not cause.between]
    right = [(cause.name, cause.right(d)) for cause in shown if not findings[cause.name]]
    speaks = bool(peers) or found.hosts[0].key == mine.key
    return Report(d, [finding for each in findings.values() for finding in each], right, speaks)
