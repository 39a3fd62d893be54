"""`unisono list`: the algorithms there are, with their steps and bytes."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.algorithms import list_algorithms
from unisono.cli.schedules import say, show
from unisono.errors import UsageError
from unisono.program.defaults import TABLE
from unisono.schedule import COLLECTIVES

__all__ = ["list_"]


def list_(
    collective: Annotated[
        str | None, typer.Argument(help="Only what does this collective.", show_default="all of them")
    ] = None,
) -> None:
    """List the algorithms: for each collective, their steps and the bytes that the busiest rank sends.

    A star marks what runs by default.

    unisono list all_reduce
    """
    if collective is not None and collective not in COLLECTIVES:
        raise UsageError(f"unknown collective {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    console = Console(highlight=False)
    for name in COLLECTIVES if collective is None else (collective,):
        show(console, _table(name))
    say("Bytes: sent by the busiest rank, as a share of the collective's. n ranks, k pieces, L = ceil(log2 n),")
    say("p the largest power of two up to n, x = n - p, a columns and b rows of the squarest grid.")
    say("* runs by default: `unisono plan --default` says from which size to which.")


def _table(collective: str) -> Table:
    table = Table(box=None, pad_edge=False, title=collective, title_justify="left", title_style="bold")
    for heading in ("algorithm", "steps", "bytes", "what it does"):
        table.add_column(heading, no_wrap=heading == "algorithm", header_style="dim")
    defaults = {row.schedule for row in TABLE if row.collective == collective}
    for e in list_algorithms():
        if e.collective == collective:
            note = " Simulation only." if e.simulation_only else ""
            table.add_row(e.name + " *" * (e.name in defaults), str(e.steps), str(e.nbytes_per_rank), e.summary + note)
    table.add_row()
    return table
