"""`unisono topo`: what the hosts of a job are and have, and what the links between them carry."""

import json
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.backend.launchers import launched, master_address
from unisono.cli.common import FOUND_EXIT, check_writable, echo, show, write
from unisono.cli.options import Peers, Port, Timeout, checked_port
from unisono.schedule import Link, as_hosts, joined, preset
from unisono.schedule.topology_file import to_json
from unisono.topo.facts import Facts
from unisono.topo.heat_map import Links, describe, heading, matrices, page, save_picture, table
from unisono.topo.links import LinkCost
from unisono.topo.survey import survey
from unisono.units import show_count

__all__ = ["topo"]


def topo(
    peer: Peers = None,
    port: Port = None,
    timeout: Timeout = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all facts, and a measured topology for --topology.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page, too.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the matrices as a picture, too.")] = None,
) -> None:
    """Show hosts with their cores, caches, interfaces and GPUs, and the measured latency and bandwidth between them.

    Run it as the job is run, on all hosts, by torchrun, mpiexec or srun; or on every host by hand, naming the others.
    Alone it shows this host. Exit code 1 if a host did not come, or could not be reached. Examples:

        unisono topo

        torchrun --nnodes 2 --nproc-per-node 1 --master-addr host0 --no-python unisono topo --html topo.html
    """
    chosen = checked_port(port, timeout)
    check_writable(html)
    check_writable(png)
    place = launched()
    if place is not None and place.local_rank:
        master_address(place)  # which may take all ranks
        return
    with survey(place, peer or [], chosen, timeout) as found:
        names = found.names()
        links: Links = {names[a]: {names[b]: cost for b, cost in row.items()} for a, row in found.links().items()}
        hosts, absent, speaks = found.hosts, found.absent, bool(peer) or found.hosts[0].key == found.mine.key
    named = [names[each.key] for each in hosts]
    if speaks:
        _print(hosts, names, links, as_json)
        drawn = matrices(named, links) if len(hosts) > 1 else []
        if html is not None:
            write(html, page(hosts, names, drawn))
        if png is not None and drawn:
            save_picture(png, hosts, drawn)
            echo(f"wrote {png}")
        if absent:
            what = "ranks" if place else "hosts"
            echo(f"{absent} {what} did not come within {timeout:g} s, or could not be reached: see `unisono doctor`")
    if absent or any(isinstance(cost, str) for row in links.values() for cost in row.values()):
        raise typer.Exit(FOUND_EXIT)


def _print(hosts: list[Facts], names: dict[str, str], links: Links, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(_plain(hosts, names, links), indent=1))
        return
    console = Console(highlight=False)
    show(console, Text.assemble(("unisono topo", "bold"), f"   {show_count(len(hosts), 'host')}\n"))
    for host in hosts:
        facts = Table.grid(padding=(0, 2))
        for name, words in describe(host):
            facts.add_row(Text(f"  {name}", "dim"), words)
        show(console, Text(heading(host, names[host.key]), "bold"))
        show(console, facts)
        echo(f"\n{host.gpu_links}\n" if host.gpu_links else "")
    if len(hosts) > 1:
        for matrix in matrices([names[each.key] for each in hosts], links):
            show(console, table(matrix))
            echo("")
    for a, row in links.items():
        for b, cost in row.items():
            if isinstance(cost, str):
                echo(f"✗ {a} can not connect to {b}: {cost}")


def _plain(hosts: list[Facts], names: dict[str, str], links: Links) -> dict[str, Any]:
    """The facts and, where every link was measured, the fields of a measured topology.

    Inside a host they are those of the preset: shared memory is measured where a group is made, not here.
    """
    named = [names[each.key] for each in hosts]
    plain: dict[str, Any] = {"facts": {names[each.key]: asdict(each) for each in hosts}}
    plain["links"] = {
        a: {b: c if isinstance(c, str) else asdict(c) for b, c in row.items()} for a, row in links.items()
    }
    inside = preset("shared_memory", 1)
    between: list[tuple[Link, ...]] = []
    for host, a in zip(hosts, named, strict=True):
        costs = [links.get(a, {}).get(b) if b != a else None for b in named]
        known = [cost for cost in costs if isinstance(cost, LinkCost)]
        if len(known) < len(hosts) - 1:
            return plain
        name = host.towards_interface or "network"
        between.append(tuple(Link(name, c.alpha, c.beta) if isinstance(c, LinkCost) else inside.intra for c in costs))
    ends = list(accumulate(host.local_world_size for host in hosts))
    ranks = [range(first, end) for first, end in pairwise([0, *ends])]
    return plain | to_json(joined(as_hosts(ranks, ends[-1]), inside.intra, tuple(between), inside.gamma))
