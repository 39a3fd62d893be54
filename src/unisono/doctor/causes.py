"""The causes, in the order of the report: those for which public reports of PyTorch, NCCL and Horovod name most.

Each search reads what all hosts have found and yields the host that has the cause (None where it is no single one's),
words, and the remedy there; where it yields nothing, ``right`` says what shows that all is well. Never imports torch.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from statistics import median
from typing import NamedTuple

from unisono.doctor.probes import NAMING_SECONDS, Probes
from unisono.topo.facts import Facts
from unisono.topo.links import LinkCost
from unisono.topo.survey import Survey
from unisono.units import name_ranks, show_nbytes, show_seconds

__all__ = ["CAUSES", "Cause", "Diagnosis", "Finding"]

_IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SMALL_SHM, _RDMA_MEMLOCK = 256 << 20, 1 << 30
_SLOW, _SLOW_LINK, _CLOCK_SECONDS, _SLOW_NAMING = 3.0, 3.0, 1.0, 1.0
_FILES = 256  # descriptors that a process needs beside its sockets
_UNLIMITED = (-1, sys.maxsize)
_Found = Iterator[tuple[Facts | None, str, str]]


class Finding(NamedTuple):
    """One cause on one host; ``host`` is empty where it is no single one's."""

    cause: str
    host: str
    words: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis(Survey):
    """What all hosts have found: a survey, and by their keys what each has tried. ``endpoint``: torchrun's, if used."""

    probes: Mapping[str, Probes]
    endpoint: str

    @property
    def several(self) -> bool:
        """True if the job is to run on more than this host."""
        return len(self.hosts) > 1 or self.absent > 0

    def name(self, host: Facts) -> str:
        """What to call a host."""
        return self.names()[host.key]

    def tried(self) -> Iterator[tuple[Facts, Probes]]:
        """The hosts that have reported what they tried."""
        return ((each, self.probes[each.key]) for each in self.hosts if each.key in self.probes)


class Cause(NamedTuple):
    """A name, what looks for it, and what is right where it finds nothing; ``between``: it takes several hosts."""

    name: str
    between: bool
    search: Callable[[Diagnosis], _Found]
    right: Callable[[Diagnosis], str]

    def find(self, d: Diagnosis) -> Iterator[Finding]:
        """Where the cause is there."""
        for host, words, remedy in self.search(d):
            yield Finding(self.name, d.name(host) if host else "", words, remedy)


CAUSES: list[Cause] = []


def _cause(
    name: str, right: Callable[[Diagnosis], str], between: bool = False
) -> Callable[[Callable[[Diagnosis], _Found]], None]:
    """Makes a search the next cause of the report."""
    return lambda search: CAUSES.append(Cause(name, between, search, right))


@_cause("ranks", lambda d: _listed(d, lambda each: f"({_span(each)})" if d.mine.launcher else "is there"))
def _ranks(d: Diagnosis) -> _Found:
    """Ranks that are there twice, or not at all."""
    first: dict[int, Facts] = {}
    for host in d.hosts if d.mine.launcher else ():
        other = first.setdefault(host.rank, host)
        if other is not host:
            words = f"it has rank {host.rank}, and so has {d.name(other)}"
            yield host, words, "give each host its own --node-rank (PET_NODE_RANK)"
    if d.absent:
        what = "ranks" if d.mine.launcher else "hosts"
        there = _listed(d, lambda each: f"({_span(each)})" if d.mine.launcher else "")
        words = f"{d.absent} of {d.expected} {what} did not come within {d.exchange.seconds:g} s; there are {there}"
        yield None, words, "run this command on every host, with the same MASTER_ADDR, port and number of nodes"


@_cause("own name", lambda d: _listed(d, lambda each: f"is {', '.join(each.own_name)}"), between=True)
def _own_name(d: Diagnosis) -> _Found:
    """A host whose own name leads peers to themselves, or nowhere."""
    for host in d.hosts:
        address, own = next(iter(host.addresses), "ADDRESS"), ", ".join(host.own_name)
        line = f"the line `{address} {host.hostname}` in /etc/hosts"
        if not own:
            yield host, f"its own name {host.hostname} does not resolve", f"{line} there"
        elif d.several and _loopback(host.own_name) and not host.variables.get("GLOO_SOCKET_IFNAME"):
            remedy = f"set {_use(host)} there, or {line} in place of the one for {host.own_name[0]}"
            yield host, f"its own name resolves to {own}, which peers can not reach: Gloo publishes that", remedy


@_cause("resolver", lambda d: "answers in time")
def _resolver(d: Diagnosis) -> _Found:
    """A resolver for which torch's stores wait at every connection."""
    remedy = "name a server that answers in /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1' there"
    for host, probes in d.tried():
        if probes.naming > _SLOW_NAMING:
            took = show_seconds(probes.naming) + " or more" * (probes.naming >= NAMING_SECONDS)
            words = f"the resolver takes {took} for the name of an address"
            yield host, f"{words}: torch's stores wait for it at every connection", remedy


@_cause("interface", lambda d: _listed(d, lambda each: f"{each.towards_interface} ({each.towards})"), between=True)
def _interface(d: Diagnosis) -> _Found:
    """A host on which Gloo or NCCL take an interface that does not lead to the peers."""
    for host in d.hosts:
        found = [(variable, host.variables.get(variable, "")) for variable in _IFNAMES]
        for variable, text in found:
            if words := _wrong_interface(variable, text, host):
                yield host, words, f"set {_use(host)} there"
        named = next((each for each in host.interfaces if set(each.addresses) & set(host.own_name)), None)
        other = named is not None and not named.loopback and named.name != host.towards_interface
        if d.several and other and named is not None and host.towards_interface and not found[0][1]:
            words = f"its own name stands for {named.name}, which Gloo takes"
            words += f", but packets to {host.master} leave by {host.towards_interface}"
            yield host, words, f"set {_use(host)} there"


def _wrong_interface(variable: str, text: str, host: Facts) -> str:
    """What is wrong with an interface that a variable names; NCCL's may be prefixes, exact (=), or excluded (^)."""
    if not text or text.startswith("^"):
        return ""
    exact = variable.startswith("GLOO") or text.startswith("=")
    parts = [part for part in text.removeprefix("=").split(",") if part]
    names = [each.name for each in host.interfaces]
    taken = [name for name in names if any(name == part if exact else name.startswith(part) for part in parts)]
    if not taken:
        return f"{variable}={text} names no interface there: it has {', '.join(names)}"
    if host.towards_interface and host.towards_interface not in taken:
        return f"{variable}={text}, but packets to {host.master} leave by {host.towards_interface} ({host.towards})"
    return ""


@_cause("master address", lambda d: f"{d.mine.master} is reached by all", between=True)
def _master(d: Diagnosis) -> _Found:
    """MASTER_ADDR and its port can not be reached, or mean another host."""
    for host in d.hosts:
        if len(d.hosts) > 1 and host.rank and host.launcher and _loopback(host.master_addresses):
            means = ", ".join(host.master_addresses) or "nothing"
            remedy = f"set MASTER_ADDR to an address of {d.name(d.hosts[0])} on every host"
            yield host, f"{host.master} means {means} there, not rank 0's host", remedy
    for host, probes in d.tried():
        if probes.master:
            address, port = (host.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            remedy = {
                "timed out": f"let {d.name(host)} connect to TCP port {port} of {address}: a firewall drops the "
                f"packets, or a container there lacks --network host (or -p {port}:{port}), or the address is nobody's",
                "refused": f"start rank 0 (torchrun's node 0) on {address} first; is it the right host, and port?",
                "name does not resolve": "give the address in place of the name",
            }.get(probes.master, f"give {d.name(host)} a route to {address}")
            yield host, f"{address} port {port}: {probes.master}", remedy


@_cause("open ports", lambda d: "every host reaches every other one", between=True)
def _open_ports(d: Diagnosis) -> _Found:
    """Hosts that do not let each other in on every port."""
    for host, probes in d.tried():
        name, has_master = d.name(host), {"MASTER_ADDR", "MASTER_PORT"} <= host.variables.keys()
        reached = ", though the master port is open" if has_master and not probes.master else ""
        for key, why in probes.links.items():
            if isinstance(why, str):
                peer = d.names()[key]
                words = f"cannot connect to {peer} ({why}){reached}: Gloo and NCCL listen on any port"
                ports = f"every TCP port of {peer} (sysctl net.ipv4.ip_local_port_range)"
                yield host, words, f"let {name} connect to {ports}, or run its container with --network host"
        if host.key == d.mine.key and d.absent:
            for address, why in d.failures.items():
                words = f"cannot connect to {address} port {d.exchange.port}, where doctor meets ({why}){reached}"
                yield host, words, f"run unisono doctor there, too; if it does run, let {name} connect to that port"


@_cause("master port", lambda d: d.mine.variables.get("MASTER_PORT", "not given"))
def _master_port(d: Diagnosis) -> _Found:
    """The master port is another program's."""
    for host, probes in d.tried():
        if probes.port_holder:
            other = f"MASTER_PORT={probes.free_port} on all hosts"
            words = f"port {host.variables.get('MASTER_PORT', '')} is taken by {probes.port_holder}"
            yield host, words, f"{other}, or torchrun --master-port 0 on one host; or end it"


@_cause("endpoint", lambda d: f"{d.endpoint} is of one host" if d.endpoint else "not given", between=True)
def _endpoint(d: Diagnosis) -> _Found:
    """torchrun's endpoint is served by no host, or by several."""
    if not d.endpoint or len(d.probes) < len(d.hosts):
        return
    here = [host for host, probes in d.tried() if probes.endpoint_here]
    address = d.endpoint.rpartition(":")[0] or d.endpoint
    owner = next((each for each in d.hosts if address in each.addresses or address == each.hostname), d.hosts[0])
    if not here:
        words = f"torchrun takes no host for that of --rdzv-endpoint {d.endpoint}: all wait for another one to serve it"
        yield owner, words, "add --rdzv-conf is_host=1 there, is_host=0 on the others"
    elif len(here) > 1:
        words = f"{' and '.join(map(d.name, here))} each take themselves for the host of --rdzv-endpoint {d.endpoint}"
        given = next(iter(owner.addresses), owner.hostname)
        yield None, words, f"give an address of one host, such as {given}, on all of them"


@_cause("versions", lambda d: ", ".join(f"{package} {version}" for package, version in d.mine.versions.items()))
def _versions(d: Diagnosis) -> _Found:
    """Hosts that have other versions than the rest."""
    for package in dict.fromkeys(name for host in d.hosts for name in host.versions):
        have = [host.versions.get(package, "").partition("+")[0] for host in d.hosts]
        usual = Counter(have).most_common(1)[0][0] if len(d.hosts) > 2 else have[0]
        for host, version in zip(d.hosts, have, strict=True):
            if version != usual:
                name = {"nccl": "nvidia-nccl-cu12"}.get(package, package)
                remedy = f"python -m pip install {name}=={usual}" if usual else f"python -m pip uninstall {name}"
                words = f"{package} {version or 'is missing'}, the others have {usual or 'none'}"
                yield host, words, f"there: {remedy if package != 'python' else f'run Python {usual}'}"


@_cause("/dev/shm", lambda d: _listed(d, lambda each: show_nbytes(each.shm)))
def _shm(d: Diagnosis) -> _Found:
    """A host whose /dev/shm is as small as Docker makes it."""
    for host in d.hosts:
        if host.shm < _SMALL_SHM:
            words = f"/dev/shm has {show_nbytes(host.shm)}: NCCL and DataLoader's workers need more (unisono uses none)"
            yield host, words, "start its container with --shm-size=1g or --ipc=host"


@_cause("MTU", lambda d: _listed(d, lambda each: str(each.mtu)), between=True)
def _mtu(d: Diagnosis) -> _Found:
    """A host whose large packets do not come through."""
    least = min((each.mtu for each in d.hosts if each.mtu), default=0)
    for host, probes in d.tried():
        lost = [d.names()[key] for key, words in probes.datagrams.items() if words == "vanished"]
        unknown = any(words != "passed" for words in probes.datagrams.values())
        if lost:
            words = f"packets of its MTU, {host.mtu} bytes, do not reach {', '.join(lost)}, small ones do"
        elif unknown and host.mtu > least > 0:
            words = f"its MTU is {host.mtu}, that of another host {least}"
        else:
            continue
        smaller = least if least < host.mtu else 1500 if host.mtu > 1500 else 1280
        remedy = f"ip link set {host.towards_interface} mtu {smaller} there, or raise it on the whole path"
        yield host, f"{words}: large messages hang", remedy


@_cause("slow host", lambda d: _listed(d, lambda each: f"{each.usable_cores:g} cores"))
def _slow(d: Diagnosis) -> _Found:
    """A host or a link that all others wait for."""
    for host in d.hosts:
        ranks, usable = host.local_world_size, host.usable_cores
        if usable < ranks:
            limit = f"its container's quota is {host.quota:g}" if host.quota else "its affinity allows no more"
            remedy = f"give the container {ranks} cores (docker run --cpus), or start fewer ranks there"
            yield host, f"{ranks} ranks share {usable:g} of {host.cores} cores: {limit}", remedy
    tried = list(d.tried())
    for host, probes in tried:
        others = [each.seconds for other, each in tried if other.key != host.key and each.seconds]
        if others and probes.seconds > _SLOW * median(others):
            words = f"a computation takes {show_seconds(probes.seconds)}, on the others {show_seconds(median(others))}"
            remedy = "look there for other work (top), for a limit of its container, and at the clock of its cores"
            yield host, f"{words}: all ranks wait for the slowest", remedy
    yield from _slow_links(d)


def _slow_links(d: Diagnosis) -> _Found:
    costs = [(host, key, cost) for host, probes in d.tried() for key, cost in probes.links.items()]
    known = [(host, key, cost) for host, key, cost in costs if isinstance(cost, LinkCost)]
    if len(known) < 6:  # of three hosts
        return
    alpha, beta = (median(getattr(cost, name) for _, _, cost in known) for name in ("alpha", "beta"))
    usual = f"the median {show_seconds(alpha)} and {_rate(beta)}"
    for host, key, cost in known:
        if cost.alpha > max(_SLOW_LINK * alpha, 1e-3) or cost.beta > _SLOW_LINK * beta:
            words = f"its link to {d.names()[key]} takes {show_seconds(cost.alpha)} and carries {_rate(cost.beta)}"
            remedy = "look at cables, switch ports and the speed that the interfaces have agreed on (ethtool)"
            yield host, f"{words}, {usual}", remedy


def _rate(beta: float) -> str:
    return f"{8e-9 / beta:.3g} Gbit/s"


@_cause("limits", lambda d: _listed(d, lambda each: f"{each.nofile} files"))
def _limits(d: Diagnosis) -> _Found:
    """Limits of processes that a job of this size exceeds."""
    for host in d.hosts:
        needed = _FILES + 4 * host.world_size
        if host.nofile not in _UNLIMITED and host.nofile < needed:
            words = f"a process may open {host.nofile} files; {host.world_size} ranks take a socket each per group"
            yield host, words, f"ulimit -n {needed} there"
        if host.infiniband and host.memlock not in _UNLIMITED and host.memlock < _RDMA_MEMLOCK:
            words = f"a process may lock {show_nbytes(host.memlock)}; RDMA registers more"
            yield host, words, "ulimit -l unlimited (docker run --ulimit memlock=-1) there"


@_cause("clocks", lambda d: "within a second of each other", between=True)
def _clocks(d: Diagnosis) -> _Found:
    """Clocks that differ."""
    clocks = [(host, probes.clock) for host, probes in d.tried() if probes.clock]
    usual = median([clock for _, clock in clocks] if len(clocks) > 2 else [clock for _, clock in clocks[:1]] or [0.0])
    for host, clock in clocks:
        if abs(clock - usual) > _CLOCK_SECONDS:
            words = f"its clock is {show_seconds(abs(clock - usual))} {'ahead' if clock > usual else 'behind'}"
            yield host, f"{words}: logs and traces can not be compared", "run chronyd there"


def _loopback(addresses: Sequence[str]) -> bool:
    """True if all are addresses of a host towards itself."""
    return all(ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def _listed(d: Diagnosis, words: Callable[[Facts], str]) -> str:
    """Words on every host, by comma."""
    return ", ".join(f"{d.name(each)} {words(each)}".strip() for each in d.hosts)


def _use(host: Facts) -> str:
    """The variables that make both libraries take the interface towards the peers."""
    name = host.towards_interface or next((each.name for each in host.interfaces if not each.loopback), "eth0")
    return " ".join(f"{variable}={name}" for variable in _IFNAMES)


def _span(host: Facts) -> str:
    """The ranks of a host."""
    return name_ranks(list(range(host.rank, host.rank + host.local_world_size)))
