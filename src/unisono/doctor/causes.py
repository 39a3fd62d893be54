"""The causes that are looked for. They are those that public reports of PyTorch, NCCL and Horovod name most.

A check reads what all hosts have found and yields findings, each with the remedy for the host that has it; where it
yields none, its other function says what is right.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from unisono.doctor import host_causes as host
from unisono.doctor import network_causes as network
from unisono.doctor.diagnosis import Diagnosis, Finding, listed, span
from unisono.units import show_nbytes

__all__ = ["CAUSES", "Cause"]


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
