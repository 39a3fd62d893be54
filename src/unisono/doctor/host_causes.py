"""Causes in what the hosts are and have. Never imports torch."""

import sys
from collections import Counter
from collections.abc import Iterator
from statistics import median

from unisono.doctor.diagnosis import Diagnosis, Finding, listed, span
from unisono.topo.facts import Facts
from unisono.topo.links import LinkCost
from unisono.units import show_nbytes, show_seconds

__all__ = ["clocks", "limits", "mtu", "ranks", "shm", "slow", "versions"]

_SMALL_SHM, _RDMA_MEMLOCK = 256 << 20, 1 << 30
_SLOW, _SLOW_LINK, _CLOCK_SECONDS = 3.0, 3.0, 1.0
_FILES = 256  # descriptors that a process needs beside its sockets
_UNLIMITED = (-1, sys.maxsize)


# What the hosts are


def versions(d: Diagnosis) -> Iterator[Finding]:
    """Hosts that have other versions than the rest."""
    for package in dict.fromkeys(name for host in d.hosts for name in host.versions):
        have = [host.versions.get(package, "").partition("+")[0] for host in d.hosts]
        usual = Counter(have).most_common(1)[0][0] if len(d.hosts) > 2 else have[0]
        for host, version in zip(d.hosts, have, strict=True):
            if version != usual:
                name = {"nccl": "nvidia-nccl-cu12"}.get(package, package)
                remedy = f"python -m pip install {name}=={usual}" if usual else f"python -m pip uninstall {name}"
                yield Finding(
                    "versions",
                    d.name(host),
                    f"{package} {version or 'is missing'}, the others have {usual or 'none'}",
                    f"there: {remedy if package != 'python' else f'run Python {usual}'}",
                )


def shm(d: Diagnosis) -> Iterator[Finding]:
    """A host whose /dev/shm is as small as Docker makes it."""
    for host in d.hosts:
        if host.shm < _SMALL_SHM:
            yield Finding(
                "/dev/shm",
                d.name(host),
                f"/dev/shm has {show_nbytes(host.shm)}: NCCL and DataLoader's workers need more (unisono uses none)",
                "start its container with --shm-size=1g or --ipc=host",
            )


def mtu(d: Diagnosis) -> Iterator[Finding]:
    """A host whose large packets do not come through."""
    where, least = {each.key: each for each in d.hosts}, min((each.mtu for each in d.hosts if each.mtu), default=0)
    for host, probes in d.tried():
        lost = [d.name(where[key]) for key, words in probes.datagrams.items() if words == "vanished"]
        unknown = any(words != "passed" for words in probes.datagrams.values())
        if lost:
            words = f"packets of its MTU, {host.mtu} bytes, do not reach {', '.join(lost)}, small ones do"
        elif unknown and host.mtu > least > 0:
            words = f"its MTU is {host.mtu}, that of another host {least}"
        else:
            continue
        smaller = least if least < host.mtu else 1500 if host.mtu > 1500 else 1280
        remedy = f"ip link set {host.towards_interface} mtu {smaller} there, or raise it on the whole path"
        yield Finding("MTU", d.name(host), f"{words}: large messages hang", remedy)


def slow(d: Diagnosis) -> Iterator[Finding]:
    """A host or a link that all others wait for."""
    for host in d.hosts:
        if host.usable_cores < host.local_world_size:
            limit = f"its container's quota is {host.quota:g}" if host.quota else "its affinity allows no more"
            yield Finding(
                "slow host",
                d.name(host),
                f"{host.local_world_size} ranks share {host.usable_cores:g} of {host.cores} cores: {limit}",
                f"give the container {host.local_world_size} cores (docker run --cpus), or start fewer ranks there",
            )
    tried = list(d.tried())
    for host, probes in tried:
        others = [each.seconds for other, each in tried if other.key != host.key and each.seconds]
        if others and probes.seconds > _SLOW * median(others):
            yield Finding(
                "slow host",
                d.name(host),
                f"a computation takes {show_seconds(probes.seconds)}, on the others {show_seconds(median(others))}: "
                "all ranks wait for the slowest",
                "look there for other work (top), for a limit of its container, and at the clock of its cores",
            )
    yield from _slow_links(d)


def _slow_links(d: Diagnosis) -> Iterator[Finding]:
    costs = {(host.key, key): cost for host, probes in d.tried() for key, cost in probes.links.items()}
    known = {pair: cost for pair, cost in costs.items() if isinstance(cost, LinkCost)}
    if len(known) < 6:  # of three hosts
        return
    alpha, beta = (median(getattr(cost, name) for cost in known.values()) for name in ("alpha", "beta"))
    where = {each.key: d.name(each) for each in d.hosts}
    for (host, peer), cost in known.items():
        if cost.alpha > max(_SLOW_LINK * alpha, 1e-3) or cost.beta > _SLOW_LINK * beta:
            yield Finding(
                "slow host",
                where[host],
                f"its link to {where[peer]} takes {show_seconds(cost.alpha)} and carries {_rate(cost)}, the median "
                f"{show_seconds(alpha)} and {_rate(LinkCost(alpha, beta))}",
                "look at cables, switch ports and the speed that the interfaces have agreed on (ethtool)",
            )


def _rate(cost: LinkCost) -> str:
    return f"{8e-9 / cost.beta:.3g} Gbit/s"


def ranks(d: Diagnosis) -> Iterator[Finding]:
    """Ranks that are there twice, or not at all."""
    first: dict[int, Facts] = {}
    for host in d.hosts if d.mine.launcher else ():
        other = first.setdefault(host.rank, host)
        if other is not host:
            yield Finding(
                "ranks",
                d.name(host),
                f"it has rank {host.rank}, and so has {d.name(other)}",
                "give each host its own --node-rank (PET_NODE_RANK)",
            )
    if d.absent:
        what = "ranks" if d.mine.launcher else "hosts"
        there = listed(d, lambda each: f"({span(each)})" if d.mine.launcher else "")
        yield Finding(
            "ranks",
            "",
            f"{d.absent} of {d.expected} {what} did not come within {d.seconds:g} s; there are {there}",
            "run this command on every host, with the same MASTER_ADDR, port and number of nodes",
        )


def limits(d: Diagnosis) -> Iterator[Finding]:
    """Limits of processes that a job of this size exceeds."""
    for host in d.hosts:
        needed = _FILES + 4 * host.world_size
        if host.nofile not in _UNLIMITED and host.nofile < needed:
            words = f"a process may open {host.nofile} files; {host.world_size} ranks take a socket each per group"
            yield Finding("limits", d.name(host), words, f"ulimit -n {needed} there")
        if host.infiniband and host.memlock not in _UNLIMITED and host.memlock < _RDMA_MEMLOCK:
            words = f"a process may lock {show_nbytes(host.memlock)}; RDMA registers more"
            yield Finding("limits", d.name(host), words, "ulimit -l unlimited (docker run --ulimit memlock=-1) there")


def clocks(d: Diagnosis) -> Iterator[Finding]:
    """Clocks that differ."""
    clocks = [(host, probes.clock) for host, probes in d.tried() if probes.clock]
    usual = median([clock for _, clock in clocks] if len(clocks) > 2 else [clock for _, clock in clocks[:1]] or [0.0])
    for host, clock in clocks:
        if abs(clock - usual) > _CLOCK_SECONDS:
            words = f"its clock is {show_seconds(abs(clock - usual))} {'ahead' if clock > usual else 'behind'}"
            yield Finding("clocks", d.name(host), f"{words}: logs and traces can not be compared", "run chronyd there")
