"""`unisono draw`: a schedule as a text grid, a picture, an animated page, a trace, or in its text form."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unisono.cli.schedules import find_schedule, say, show, write
from unisono.draw import STYLES, draw_gantt, draw_html, draw_svg, draw_trace
from unisono.draw import draw as draw_text
from unisono.errors import UsageError
from unisono.schedule import PRESETS, Schedule, preset
from unisono.simulate import Timeline, simulate
from unisono.units import parse_nbytes

__all__ = ["draw"]

_MOST_TRANSFERS = 2_000_000


def draw(
    source: Annotated[str, typer.Argument(metavar="NAME|FILE", help="An algorithm, a file, or - for standard input.")],
    collective: Annotated[
        str | None, typer.Argument(help="What the algorithm is to do.", show_default="all_reduce")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="Number of ranks.", show_default="4")] = None,
    root: Annotated[
        int | None, typer.Option(help="Root of a broadcast, reduce, gather or scatter.", show_default="0")
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Pieces per block, for pipelining.", show_default="1")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the text form, which `unisono verify -` reads.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.")] = None,
    style: Annotated[str, typer.Option(help=f"Of the picture: {' or '.join(STYLES)}.")] = STYLES[0],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that plays the schedule.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Print when what happens, simulated.")] = False,
    gantt: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timeline as a picture.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline for Perfetto, as JSON.")
    ] = None,
    topology: Annotated[str, typer.Option(help=f"Of the timeline: {', '.join(PRESETS)}.")] = "nvlink",
    nbytes: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Of the timeline, e.g. 4KiB.")] = "1MiB",
    width: Annotated[
        int | None, typer.Option(min=20, help="Characters per line.", show_default="the terminal's")
    ] = None,
) -> None:
    """Draw a schedule: what every rank sends and receives in every step.

    Examples, the first one to read, the others to look at; FILE may be - for standard output:

        unisono draw ring all_reduce -n 4

        unisono draw double_tree -n 8 --svg double_tree.svg --html double_tree.html

        unisono draw ring -n 8 --timeline --topology infiniband --bytes 64KiB
    """
    schedule = find_schedule(source, collective, ranks, root, chunks)
    console = Console(width=width, highlight=False)
    files: list[tuple[Path | None, Callable[[], str]]] = [
        (svg, lambda: draw_svg(schedule, style)),
        (html, lambda: draw_html(schedule)),
    ]
    played: Timeline | None = None
    if timeline or gantt or trace:
        run = played = simulate(schedule, preset(topology, schedule.world_size), parse_nbytes(nbytes))
        files += [(gantt, lambda: draw_gantt(run)), (trace, lambda: draw_trace(run))]
    made = [(path, make()) for path, make in files if path is not None]
    if text:
        say(_text_form(schedule))
    if timeline and played is not None:
        show(console, draw_text(played, console.width))
    for path, content in made:
        write(path, content)
    if not (text or timeline or made):
        show(console, draw_text(schedule, console.width))


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
