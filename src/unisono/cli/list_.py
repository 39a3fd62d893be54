"""`unisono list`: the algorithms there are, with their steps and bytes."""

import inspect
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.algorithms import list_algorithms
from unisono.algorithms.pipelines import PIPELINE, SCHEDULES, bubble_formula, build_pipeline
from unisono.cli.common import echo, show
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
    wanted = (*COLLECTIVES, PIPELINE)
    if collective is not None and collective not in wanted:
        raise UsageError(f"unknown collective {collective!r}: expected one of {', '.join(wanted)}")
    console = Console(highlight=False)
    for name in wanted if collective is None else (collective,):
        show(console, _pipelines() if name == PIPELINE else _table(name))
    if collective == PIPELINE:
        echo("Bubble: share of its time that a rank is idle, for F, B and W equally long; of 4 ranks, 8 microbatches.")
        return
    echo("Bytes: sent by the busiest rank, as a share of the collective's. n ranks, k pieces, L = ceil(log2 n),")
    echo("p the largest power of two up to n, x = n - p, a columns and b rows of the squarest grid.")
    echo("* runs by default: `unisono plan --default` says from which size to which.")


def _pipelines() -> Table:
    table = Table(box=None, pad_edge=False, title=PIPELINE, title_justify="left", title_style="bold")
    for heading in ("schedule", "stages per rank", "bubble", "what it does"):
        table.add_column(heading, no_wrap=heading == "schedule", header_style="dim")
    for name, builder in SCHEDULES.items():
        made = build_pipeline(name, 4, 8)
        summary = (inspect.getdoc(builder) or "").partition("\n")[0].partition(" 2 ranks,")[0]
        table.add_row(name, str(made.num_stages // 4), f"{bubble_formula(made) or 0:.1%}", summary)
    table.add_row()
    return table


def _table(collective: str) -> Table:
    table = Table(box=None, pad_edge=False, title=collective, title_justify="left", title_style="bold")
    for heading in ("algorithm", "steps", "bytes", "what it does"):
        table.add_column(heading, no_wrap=heading == "algorithm", header_style="dim")
    defaults = {row.schedule for row in TABLE if row.collective == collective}
    for e in list_algorithms(collective):
        note = " Simulation only." if e.simulation_only else ""
        table.add_row(e.name + " *" * (e.name in defaults), str(e.steps), str(e.nbytes_per_rank), e.summary + note)
    table.add_row()
    return table
