"""`unisono doctor`: why a job over several hosts does not start, hangs or crawls."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unisono.cli.common import FOUND_EXIT, echo, show
from unisono.cli.options import Peers, Port, Timeout, checked_endpoint, checked_port
from unisono.doctor.examine import Report, examine
from unisono.units import show_count

__all__ = ["doctor"]


def doctor(
    peer: Peers = None,
    port: Port = None,
    timeout: Timeout = 10.0,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="As it is given to torchrun.", show_default="PET_RDZV_ENDPOINT"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found, for programs.")] = False,
) -> None:
    """Look for what keeps a job from starting, or makes it hang or crawl, and say what to do on which host.

    Run it as the job is run, on all hosts, by torchrun, mpiexec or srun; or on every host by hand, naming the others.
    It needs no group of ranks and no open port but its own. Exit code 1 if something was found. Examples:

        torchrun --nnodes 2 --nproc-per-node 1 --master-addr host0 --no-python unisono doctor

        unisono doctor --peer host1
    """
    chosen = checked_port(port, timeout)
    endpoint = checked_endpoint(rdzv_endpoint or os.environ.get("PET_RDZV_ENDPOINT", ""))
    report = examine(peer or [], chosen, timeout, endpoint)
    if report is None:
        return
    if report.speaks:
        _print(report, as_json)
    if report.findings:
        raise typer.Exit(FOUND_EXIT)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(report.to_data(), indent=2))
        return
    console = Console(highlight=False)
    there = show_count(len(report.diagnosis.hosts), "host")
    found = show_count(len(report.findings), "finding") if report.findings else "nothing wrong"
    show(console, Text.assemble(("unisono doctor", "bold"), f"   {there}, {found}"))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in report.findings:
        where = f"{finding.host}: " if finding.host else ""
        table.add_row(
            Text(" ✗", "bold red"), Text(finding.cause, "bold"), Text.assemble((where, "bold"), finding.words)
        )
        table.add_row("", "", Padding(Text(f"→ {finding.remedy}", "yellow"), (0, 0, 1, 0)))
    for cause, words in report.right:
        table.add_row(Text(" ✓", "green"), Text(cause), Text(words, "dim"))
    if not report.diagnosis.several:
        table.add_row(
            "", Text("hosts", "dim"), Text("this one alone: run it on all of a job's hosts to try the network", "dim")
        )
    show(console, table)
