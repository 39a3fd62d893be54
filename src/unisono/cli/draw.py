"""`unisono draw`: a schedule as a text grid, a picture, a page that plays, a trace, or in text; and its programs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from unisono.cli import options
from unisono.cli.common import echo, show, write
from unisono.cli.programs import Placed, programs
from unisono.cli.schedules import Asked, pipeline_costs, refuse, topology_of
from unisono.drawing import STYLES
from unisono.drawing import draw as draw_as
from unisono.errors import UsageError
from unisono.program import PLACEMENTS
from unisono.schedule import PRESETS, PipelineSchedule, Schedule
from unisono.selection import BY_DEFAULT
from unisono.simulation import simulate
from unisono.units import parse_nbytes

__all__ = ["draw"]

_MOST_TRANSFERS = 2_000_000
_NBYTES, _TOPOLOGY = "1MiB", "nvlink"

_Text = Annotated[bool, typer.Option("--text", help="Print the text form, which `unisono verify -` reads.")]
_Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.")]
_Style = Annotated[str | None, typer.Option(help=f"Style of --svg: {' or '.join(STYLES)}.", show_default=STYLES[0])]
_Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that plays the schedule.")]
_Timeline = Annotated[bool, typer.Option("--timeline", help="Print when what happens, simulated.")]
_Gantt = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timeline as a picture.")]
_Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the timeline for Perfetto, as JSON.")]
_Topology = Annotated[
    str | None, typer.Option(help=f"Where it is simulated: {', '.join(PRESETS)}.", show_default=_TOPOLOGY)
]
_Bytes = Annotated[
    str | None,
    typer.Option("--bytes", metavar="SIZE", help="Size of the call that is drawn.", show_default=_NBYTES),
]
_Width = Annotated[int | None, typer.Option(min=20, help="Characters per line.", show_default="the terminal's")]
_of_programs = partial(typer.Option, rich_help_panel="What every rank executes")
_Program = Annotated[bool, _of_programs("--program", show_default=False, help="Draw the programs of the ranks.")]
_Placement = Annotated[str | None, _of_programs(show_default="what runs", help=f"One of {', '.join(PLACEMENTS)}.")]
_Rank = Annotated[int | None, _of_programs(show_default="all", metavar="R", help="Only this rank's program.")]
_Bound = Annotated[
    bool | None,
    _of_programs("--bound/--no-bound", show_default="if --bytes is given", help="Print addresses, pieces and lengths."),
]


def draw(
    source: options.Source,
    collective: options.Collective = None,
    ranks: options.Ranks = None,
    root: options.Root = None,
    chunks: options.Chunks = None,
    hosts: options.Hosts = None,
    text: _Text = False,
    svg: _Svg = None,
    style: _Style = None,
    html: _Html = None,
    timeline: _Timeline = False,
    gantt: _Gantt = None,
    trace: _Trace = None,
    topology: _Topology = None,
    nbytes: _Bytes = None,
    width: _Width = None,
    microbatches: options.Microbatches = None,
    per_rank: options.PerRank = None,
    times: options.Times = None,
    link: options.LinkTime = None,
    program: _Program = False,
    placement: _Placement = None,
    rank: _Rank = None,
    bind: _Bound = None,
) -> None:
    """Draw a schedule: what every rank sends and receives in every step; or the programs that its ranks execute.

    Examples, the first one to read, the next to look at; FILE may be - for standard output:

        unisono draw ring all_reduce -n 4

        unisono draw double_tree -n 8 --svg double_tree.svg --html double_tree.html

        unisono draw columns -n 8 --hosts 2x4 --timeline --topology cluster --bytes 64KiB

        unisono draw zb-v -n 4 --microbatches 8 --svg zb-v.svg

        unisono draw default all_reduce -n 4 --program
    """
    asked = Asked(source, collective, ranks, root, chunks, microbatches, per_rank, hosts)
    size, console = parse_nbytes(nbytes or _NBYTES), Console(width=width, highlight=False)
    files = {"svg": svg, "html": html, "gantt": gantt, "trace": trace}
    if program:
        others = {f"--{name}": path for name, path in files.items()} | {"--timeline": timeline or None}
        refuse(others | {"--style": style, "--topology": topology}, "is of a schedule, and --program draws text")
        sized = size if bind or (bind is None and nbytes is not None and not text) else None
        _draw_programs(console, asked.find_placed(size)[0], placement, rank, text, sized)
        return
    refuse({"--placement": placement, "--rank": rank, "--bound": bind}, "is of the programs: give --program as well")
    schedule = asked.find_sized(size)
    if isinstance(schedule, PipelineSchedule):
        collectives = {"--style": style, "--topology": topology, "--bytes": nbytes}
        refuse(collectives, f"is of collectives, and {schedule.name} is a pipeline schedule: leave it out")
        how: dict[str, Any] = {"costs": pipeline_costs(schedule, times, link)}
    else:
        refuse({"--times": times, "--link": link}, "is of pipelines: leave it out")
        _refuse_unused(files, timeline, style, topology, None if source == BY_DEFAULT else nbytes)
        how = {"topology": topology_of(topology or _TOPOLOGY, schedule.world_size, hosts), "nbytes": nbytes and size}
    _draw_schedule(console, schedule, text, timeline, style, hosts, files, how)


def _refuse_unused(
    files: dict[str, Path | None], timeline: bool, style: str | None, topology: str | None, nbytes: str | None
) -> None:
    """Raises UsageError for an option of the picture, or of what is simulated, where nothing of the kind is drawn."""
    if not files["svg"]:
        refuse({"--style": style}, "is of the picture: give --svg as well")
    if not (timeline or files["gantt"] or files["trace"]):
        unused = {"--topology": topology, "--bytes": nbytes}
        refuse(unused, "is of the timeline: give --timeline, --gantt or --trace as well")


def _draw_schedule(
    console: Console,
    schedule: Schedule | PipelineSchedule,
    text: bool,
    timeline: bool,
    style: str | None,
    hosts: str | None,
    files: dict[str, Path | None],
    how: dict[str, Any],
) -> None:
    """The text form, the timeline, and the files by format, as asked for; if nothing is, what `draw` makes of it."""
    played = draw_as(simulate(schedule, **how), width=console.width) if timeline else None
    how["hosts"] = hosts
    made = [(path, draw_as(schedule, name, style=style, **how)) for name, path in files.items() if path is not None]
    if text:
        echo(_text_form(schedule))
    if played is not None:
        show(console, played)
    for path, drawing in made:
        write(path, str(drawing))
    if not (text or timeline or made):
        show(console, draw_as(schedule, width=console.width, **how))


def _draw_programs(
    console: Console, found: Placed, placement: str | None, rank: int | None, text: bool, nbytes: int | None
) -> None:
    """The programs of all ranks, or of one: as a grid, in their text form, or bound to a size."""
    if text and nbytes is not None:
        raise UsageError("--text is the form that has no sizes: leave --bound out")
    found = replace(found, placement=placement or found.placement)
    if nbytes is not None:
        echo("\n\n".join(table.to_text() for table in found.tables(nbytes, rank)))
        return
    made = programs(found.schedule, found.placement, rank)
    if text:
        echo("\n".join(each.to_text() for each in made))
    else:
        show(console, draw_as(made, width=console.width))


def _text_form(schedule: Schedule | PipelineSchedule) -> str:
    """The text form. Raises UsageError if it would fill gigabytes."""
    if isinstance(schedule, PipelineSchedule):
        return schedule.to_text()
    transfers = 0
    for step in schedule.steps:
        transfers += len(step) * step.repeat
        if transfers > _MOST_TRANSFERS:
            raise UsageError(
                f"{schedule.name} {schedule.collective.name} over {schedule.world_size} ranks has more than "
                f"{_MOST_TRANSFERS:,} transfers: print it over fewer ranks"
            )
    return schedule.to_text()
