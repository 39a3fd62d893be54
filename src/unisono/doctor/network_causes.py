"""Causes in names, addresses, interfaces and ports. Never imports torch."""

from collections.abc import Iterator

from unisono.doctor.diagnosis import IFNAMES, Diagnosis, Finding, loopback, use
from unisono.doctor.probes import NAMING_SECONDS
from unisono.topo.facts import Facts
from unisono.units import show_seconds

__all__ = ["endpoint", "interface", "master", "master_port", "open_ports", "own_name", "resolver"]

_NAMING_SECONDS = 1.0


# Names and interfaces


def own_name(d: Diagnosis) -> Iterator[Finding]:
    """A host whose own name leads peers to themselves, or nowhere."""
    for host in d.hosts:
        address = next(iter(host.addresses), "ADDRESS")
        line = f"the line `{address} {host.hostname}` in /etc/hosts"
        if not host.own_name:
            yield Finding("own name", d.name(host), f"its own name {host.hostname} does not resolve", f"{line} there")
        elif d.several and loopback(host.own_name) and not host.variables.get("GLOO_SOCKET_IFNAME"):
            yield Finding(
                "own name",
                d.name(host),
                f"its own name resolves to {', '.join(host.own_name)}, which peers can not reach: Gloo publishes that",
                f"set {use(host)} there, or {line} in place of the one for {host.own_name[0]}",
            )


def resolver(d: Diagnosis) -> Iterator[Finding]:
    """A resolver for which torch's stores wait at every connection."""
    for host, probes in d.tried():
        if probes.naming > _NAMING_SECONDS:
            took = show_seconds(probes.naming) + " or more" * (probes.naming >= NAMING_SECONDS)
            yield Finding(
                "resolver",
                d.name(host),
                f"the resolver takes {took} for the name of an address: torch's stores wait for it at every connection",
                "name a server that answers in /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1' there",
            )


def interface(d: Diagnosis) -> Iterator[Finding]:
    """A host on which Gloo or NCCL take an interface that does not lead to the peers."""
    for host in d.hosts:
        found = [(variable, host.variables.get(variable, "")) for variable in IFNAMES]
        for variable, text in found:
            if words := _wrong(variable, text, host):
                yield Finding("interface", d.name(host), words, f"set {use(host)} there")
        named = next((each for each in host.interfaces if set(each.addresses) & set(host.own_name)), None)
        other = named is not None and not named.loopback and named.name != host.towards_interface
        if d.several and other and named is not None and host.towards_interface and not found[0][1]:
            yield Finding(
                "interface",
                d.name(host),
                f"its own name stands for {named.name}, which Gloo takes, but packets to {host.master} leave by "
                f"{host.towards_interface}",
                f"set {use(host)} there",
            )


def _wrong(variable: str, text: str, host: Facts) -> str:
    """What is wrong with an interface that a variable names; NCCL's may be prefixes, exact (=), or excluded (^)."""
    if not text or text.startswith("^"):
        return ""
    exact = variable.startswith("GLOO") or text.startswith("=")
    parts = [part for part in text.removeprefix("=").split(",") if part]
    taken = [
        each
        for each in host.interfaces
        if any(each.name == part if exact else each.name.startswith(part) for part in parts)
    ]
    if not taken:
        names = ", ".join(each.name for each in host.interfaces)
        return f"{variable}={text} names no interface there: it has {names}"
    if host.towards_interface and all(each.name != host.towards_interface for each in taken):
        return f"{variable}={text}, but packets to {host.master} leave by {host.towards_interface} ({host.towards})"
    return ""


# Ports


def master(d: Diagnosis) -> Iterator[Finding]:
    """MASTER_ADDR and its port can not be reached, or mean another host."""
    for host in d.hosts:
        if len(d.hosts) > 1 and host.rank and host.launcher and loopback(host.master_addresses):
            yield Finding(
                "master address",
                d.name(host),
                f"{host.master} means {', '.join(host.master_addresses) or 'nothing'} there, not rank 0's host",
                f"set MASTER_ADDR to an address of {d.name(d.hosts[0])} on every host",
            )
    for host, probes in d.tried():
        if probes.master:
            address, port = (host.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            remedy = {
                "timed out": f"let {d.name(host)} connect to TCP port {port} of {address}: a firewall drops the "
                f"packets, or a container there lacks --network host (or -p {port}:{port}), or the address is nobody's",
                "refused": f"start rank 0 (torchrun's node 0) on {address} first; is it the right host, and port?",
                "name does not resolve": "give the address in place of the name",
            }.get(probes.master, f"give {d.name(host)} a route to {address}")
            yield Finding("master address", d.name(host), f"{address} port {port}: {probes.master}", remedy)


def open_ports(d: Diagnosis) -> Iterator[Finding]:
    """Hosts that do not let each other in on every port."""
    where = {each.key: each for each in d.hosts}
    for host, probes in d.tried():
        has_master = {"MASTER_ADDR", "MASTER_PORT"} <= host.variables.keys()
        reached = ", though the master port is open" if has_master and not probes.master else ""
        for key, words in probes.links.items():
            if isinstance(words, str):
                peer = d.name(where[key])
                yield Finding(
                    "open ports",
                    d.name(host),
                    f"cannot connect to {peer} ({words}){reached}: Gloo and NCCL listen on any port",
                    f"let {d.name(host)} connect to every TCP port of {peer} (sysctl net.ipv4.ip_local_port_range), "
                    "or run its container with --network host",
                )
        if host.key == d.mine.key and d.absent:
            for address, words in d.failures.items():
                yield Finding(
                    "open ports",
                    d.name(host),
                    f"cannot connect to {address} port {d.port}, where doctor meets ({words}){reached}",
                    f"run unisono doctor there, too; if it does run, let {d.name(host)} connect to that port",
                )


def master_port(d: Diagnosis) -> Iterator[Finding]:
    """The master port is another program's."""
    for host, probes in d.tried():
        if probes.port_holder:
            port = host.variables.get("MASTER_PORT", "")
            yield Finding(
                "master port",
                d.name(host),
                f"port {port} is taken by {probes.port_holder}",
                f"MASTER_PORT={probes.free_port} on all hosts, or torchrun --master-port 0 on one host; or end it",
            )


def endpoint(d: Diagnosis) -> Iterator[Finding]:
    """torchrun's endpoint is served by no host, or by several."""
    if not d.endpoint or len(d.probes) < len(d.hosts):
        return
    here = [host for host, probes in d.tried() if probes.endpoint_here]
    if len(here) == 1:
        return
    address = d.endpoint.rpartition(":")[0] or d.endpoint
    owner = next((each for each in d.hosts if address in each.addresses or address == each.hostname), d.hosts[0])
    others = "is_host=0 on the others"
    if not here:
        yield Finding(
            "endpoint",
            d.name(owner),
            f"torchrun takes no host for that of --rdzv-endpoint {d.endpoint}: all wait for another one to serve it",
            f"add --rdzv-conf is_host=1 there, {others}",
        )
    else:
        yield Finding(
            "endpoint",
            "",
            f"{' and '.join(map(d.name, here))} each take themselves for the host of --rdzv-endpoint {d.endpoint}",
            f"give an address of one host, such as {next(iter(owner.addresses), owner.hostname)}, on all of them",
        )
