"""`unisono list`: the algorithms there are, with their steps and bytes."""

import inspect
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.algorithms import list_algorithms
from unisono.algorithms.formula import Formula
from unisono.algorithms.pipelines import PIPELINE, SCHEDULES, bubble_formula, build_pipeline
from unisono.cli.common import echo, is_terminal, show
from unisono.errors import check_known
from unisono.program.defaults import TABLE
from unisono.schedule import COLLECTIVES

__all__ = ["list_"]

_LEAST, _UNCUT = 30, 1000  # columns for what an algorithm does; of a line that is not for a terminal


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
    if collective is not None:
        check_known("collective", collective, wanted)
    console = Console(highlight=False, width=None if is_terminal(sys.stdout) else _UNCUT)
    tables = [_pipelines() if name == PIPELINE else _table(name) for name in wanted if collective in (None, name)]
    left_out = [table for table in tables if not _fits(table, console.width)]
    for table in tables:
        show(console, table)
        echo("")
    if left_out:
        echo("What they do is left out where there is no room: make the terminal wider.")
    if collective == PIPELINE:
        echo("Bubble: share of its time that a rank is idle, for F, B and W equally long;")
        echo("of 4 ranks, 8 microbatches.")
        return
    echo("Bytes: sent by the busiest rank, as a share of the collective's.")
    echo("n ranks, k pieces, L = ceil(log2 n), p the largest power of two up to n,")
    echo("x = n-p, a columns and b rows of the squarest grid; (x>0), (a>1): 1 or 0.")
    echo("* runs by default: `unisono plan --default` says from which size to which.")


def _fits(table: Table, width: int) -> bool:
    """Takes the last column away, and returns False, where others leave it little room."""
    others = sum(2 + max(len(str(cell)) for cell in (column.header, *column.cells)) for column in table.columns[:-1])
    fits = width - others >= _LEAST
    if not fits:
        table.columns.pop()
    return fits


def _pipelines() -> Table:
    table = _titled(PIPELINE, "schedule", "stages per rank", "bubble", "what it does")
    for name, builder in SCHEDULES.items():
        made = build_pipeline(name, 4, 8)
        summary = (inspect.getdoc(builder) or "").partition("\n")[0].partition(" 2 ranks,")[0]
        table.add_row(name, str(made.num_stages // 4), f"{bubble_formula(made) or 0:.1%}", _cut(summary))
    return table


def _table(collective: str) -> Table:
    table = _titled(collective, "algorithm", "steps", "bytes", "what it does")
    defaults = {row.schedule for row in TABLE if row.collective == collective}
    for e in list_algorithms(collective):
        summary = e.summary + (" Simulation only." if e.simulation_only else "")
        table.add_row(e.name + " *" * (e.name in defaults), _dense(e.steps), _dense(e.nbytes_per_rank), _cut(summary))
    return table


def _titled(title: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1], header_style="dim")
    return table


def _dense(formula: Formula) -> str:
    return str(formula).replace(" ", "").replace("<=", "<= ")


def _cut(summary: str) -> Text:
    """On one line, cut where there is no room."""
    return Text(summary, no_wrap=True, overflow="ellipsis")
