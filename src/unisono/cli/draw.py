"""`unisono draw`: a schedule as a text grid, a picture, a page that plays, a trace, or in text; and its programs."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from unisono.cli.programs import Placed, bound, programs
from unisono.cli.schedules import DEFAULT, RANKS, find_placed, say, show, write
from unisono.drawing import STYLES, draw_gantt, draw_html, draw_svg, draw_trace
from unisono.drawing import draw as draw_text
from unisono.drawing.program import draw_program
from unisono.errors import UsageError
from unisono.program import PLACEMENTS
from unisono.schedule import PRESETS, Schedule, preset
from unisono.simulation import Timeline, simulate
from unisono.units import parse_nbytes

__all__ = ["draw"]

_MOST_TRANSFERS = 2_000_000
_NBYTES = "1MiB"

_Source = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE", help=f"An algorithm, {DEFAULT} for the one that runs, a file, or - for standard input."
    ),
]
_Collective = Annotated[str | None, typer.Argument(help="What the algorithm is to do.", show_default="all_reduce")]
_Ranks = Annotated[int | None, typer.Option("--ranks", "-n", help="Number of ranks.", show_default=str(RANKS))]
_Root = Annotated[int | None, typer.Option(help="Root of a broadcast, reduce, gather or scatter.", show_default="0")]
_Chunks = Annotated[int | None, typer.Option(help="Pieces per block, for pipelining.", show_default="1")]
_Text = Annotated[bool, typer.Option("--text", help="Print the text form, which `unisono verify -` reads.")]
_Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.")]
_Style = Annotated[str, typer.Option(help=f"Of the picture: {' or '.join(STYLES)}.")]
_Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that plays the schedule.")]
_Timeline = Annotated[bool, typer.Option("--timeline", help="Print when what happens, simulated.")]
_Gantt = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timeline as a picture.")]
_Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timeline for Perfetto, as JSON.")]
_Topology = Annotated[str, typer.Option(help=f"Of the timeline: {', '.join(PRESETS)}.")]
_Bytes = Annotated[
    str | None,
    typer.Option("--bytes", metavar="SIZE", help=f"Of the timeline, of {DEFAULT}, of --bound.", show_default=_NBYTES),
]
_Width = Annotated[int | None, typer.Option(min=20, help="Characters per line.", show_default="the terminal's")]


def _of_programs(default: str | bool, *names: str, **how: Any) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        *names, show_default=default, rich_help_panel="What every rank executes", **how
    )
    return option


_Program = Annotated[bool, _of_programs(False, "--program", help="Draw the programs of the ranks.")]
_Placement = Annotated[str | None, _of_programs("what runs", help=f"One of {', '.join(PLACEMENTS)}.")]
_Rank = Annotated[int | None, _of_programs("all", metavar="R", help="Only this rank's program.")]
_Bound = Annotated[
    bool | None, _of_programs("if --bytes is given", "--bound/--no-bound", help="Print addresses, pieces and lengths.")
]


def draw(
    source: _Source,
    collective: _Collective = None,
    ranks: _Ranks = None,
    root: _Root = None,
    chunks: _Chunks = None,
    text: _Text = False,
    svg: _Svg = None,
    style: _Style = STYLES[0],
    html: _Html = None,
    timeline: _Timeline = False,
    gantt: _Gantt = None,
    trace: _Trace = None,
    topology: _Topology = "nvlink",
    nbytes: _Bytes = None,
    width: _Width = None,
    program: _Program = False,
    placement: _Placement = None,
    rank: _Rank = None,
    bind: _Bound = None,
) -> None:
    """Draw a schedule: what every rank sends and receives in every step; or the programs that its ranks execute.

    Examples, the first one to read, the next to look at; FILE may be - for standard output:

        unisono draw ring all_reduce -n 4

        unisono draw double_tree -n 8 --svg double_tree.svg --html double_tree.html

        unisono draw ring -n 8 --timeline --topology infiniband --bytes 64KiB

        unisono draw default all_reduce -n 4 --program
    """
    size = parse_nbytes(nbytes or _NBYTES)
    found = find_placed(source, collective, ranks, root, chunks, size)[0]
    console = Console(width=width, highlight=False)
    if program:
        others = {"--svg": svg, "--html": html, "--timeline": timeline or None, "--gantt": gantt, "--trace": trace}
        _refuse(others, "is of a schedule, and --program draws text")
        sized = size if bind or (bind is None and nbytes is not None and not text) else None
        _draw_programs(console, found, placement, rank, text, sized)
        return
    _refuse({"--placement": placement, "--rank": rank, "--bound": bind}, "is of the programs: give --program as well")
    drawn = found.schedule
    run = cache(lambda: simulate(drawn, preset(topology, drawn.world_size), size))
    files: list[tuple[Path | None, Callable[[], str]]] = [
        (svg, lambda: draw_svg(drawn, style)),
        (html, lambda: draw_html(drawn)),
        (gantt, lambda: draw_gantt(run())),
        (trace, lambda: draw_trace(run())),
    ]
    _draw_schedule(console, drawn, text, run if timeline else None, files)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raises UsageError for the first option that is given."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} {why}")


def _draw_schedule(
    console: Console,
    schedule: Schedule,
    text: bool,
    run: Callable[[], Timeline] | None,
    files: list[tuple[Path | None, Callable[[], str]]],
) -> None:
    """The text form, the timeline (``run``) and the files that are asked for; if nothing is, the grid."""
    made = [(path, make()) for path, make in files if path is not None]
    played = [run()] if run is not None else []
    if text:
        say(_text_form(schedule))
    for timeline in played:
        show(console, draw_text(timeline, console.width))
    for path, content in made:
        write(path, content)
    if not (text or played or made):
        show(console, draw_text(schedule, console.width))


def _draw_programs(
    console: Console, found: Placed, placement: str | None, rank: int | None, text: bool, nbytes: int | None
) -> None:
    """The programs of all ranks, or of one: as a grid, in their text form, or bound to a size."""
    if text and nbytes is not None:
        raise UsageError("--text is the form that has no sizes: leave --bound out")
    made = programs(found.schedule, placement or found.placement, rank)
    if nbytes is not None:
        say("\n\n".join(bound(each, nbytes, found.cap).to_text() for each in made))
    elif text:
        say("\n".join(each.to_text() for each in made))
    else:
        show(console, draw_program(made, console.width))


def _text_form(schedule: Schedule) -> str:
    """The text form. Raises UsageError if it would fill gigabytes."""
    transfers = 0
    for step in schedule.steps:
        transfers += len(step) * step.repeat
        if transfers > _MOST_TRANSFERS:
            raise UsageError(
                f"{schedule.name} {schedule.collective.name} over {schedule.world_size} ranks has more than "
                f"{_MOST_TRANSFERS:,} transfers: print it over fewer ranks"
            )
    return schedule.to_text()
