"""`unisono pipeline`: show a pipeline schedule, its bubble and what it keeps in memory."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.algorithms.pipelines import SCHEDULES, bubble_formula, build_pipeline, usual_stages_per_rank
from unisono.cli.schedules import read_source, say, show, write
from unisono.drawing import draw_pipeline, draw_pipeline_svg
from unisono.errors import UsageError
from unisono.schedule.pipeline import PipelineSchedule, from_text
from unisono.simulation import PipelineCosts, PipelineTimeline, simulate_pipeline

__all__ = ["pipeline"]

_SHARE = "of a rank's whole share of layers, for one microbatch"
_LEAST_WIDTH = 40


def pipeline(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE", help=f"One of {', '.join(SCHEDULES)}, a file, or - for standard input."),
    ],
    stages: Annotated[int | None, typer.Option("--stages", "-s", help="Stages of the model.", show_default="4")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Microbatches of a step.", show_default="8")
    ] = None,
    per_rank: Annotated[
        int | None, typer.Option(help="Stages on each rank.", show_default="1; interleaved, zb-v: 2")
    ] = None,
    t_f: Annotated[float, typer.Option(help=f"Time of the forward {_SHARE}.")] = 1.0,
    t_b: Annotated[float, typer.Option(help="The same for the gradient of its input.")] = 1.0,
    t_w: Annotated[float, typer.Option(help="The same for the gradients of its weights.")] = 1.0,
    link: Annotated[float, typer.Option(help="Time of a message.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Write a Gantt chart; - is standard output.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the schedule's text form, and only that.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="All schedules on as many ranks.")] = False,
) -> None:
    """Show who works when in a pipeline, how long ranks are idle, and how many microbatches they hold.

    Examples:

        unisono pipeline 1f1b --stages 4 --microbatches 8

        unisono pipeline zb-v --stages 8 --microbatches 8 --svg zb-v.svg
    """
    schedule = _find(name, stages, microbatches, per_rank)
    if text:
        say(str(schedule))
        return
    times = (t_f, t_b, t_w, link)
    timeline = _simulate(schedule, *times)
    if svg is not None:
        write(svg, draw_pipeline_svg(timeline))
    if svg is None or str(svg) != "-":
        _report(timeline, *times)
    if compare:
        wanted = [n for n in SCHEDULES if n != schedule.name]
        others = [build_pipeline(n, schedule.world_size, schedule.num_microbatches) for n in wanted]
        _compare([timeline, *(_simulate(other, *times) for other in others)], *times)


def _find(name: str, stages: int | None, microbatches: int | None, per_rank: int | None) -> PipelineSchedule:
    """A schedule by name for so many stages, or the one a file holds."""
    if name == "-" or (name not in SCHEDULES and Path(name).exists()):
        extra = {"--stages": stages, "--microbatches": microbatches, "--per-rank": per_rank}
        for option, value in extra.items():
            if value is not None:
                raise UsageError(f"the schedule in {name} has its own numbers: leave {option} out")
        return from_text(read_source(name))
    each = usual_stages_per_rank(name) if per_rank is None else per_rank
    count = 4 if stages is None else stages
    if min(each, count) < 1:
        raise UsageError(f"a pipeline needs at least one stage, and one on each rank, got {count} and {each}")
    if count % each:
        raise UsageError(f"{count} stages do not divide into {each} on each rank: choose a multiple of {each}")
    return build_pipeline(name, count // each, 8 if microbatches is None else microbatches, per_rank)


def _simulate(schedule: PipelineSchedule, t_f: float, t_b: float, t_w: float, link: float) -> PipelineTimeline:
    """The timeline when the stages of a rank take equal parts of its times."""
    each = schedule.num_stages / max(schedule.world_size, 1)
    return simulate_pipeline(schedule, PipelineCosts(t_f / each, t_b / each, t_w / each, link))


def _formula(schedule: PipelineSchedule, t_f: float, t_b: float, t_w: float, link: float) -> str:
    """What the literature's formula gives; it knows no links."""
    value = None if link else bubble_formula(schedule, t_f, t_b, t_w)
    return "-" if value is None else f"{value:.2%}"


def _report(line: PipelineTimeline, t_f: float, t_b: float, t_w: float, link: float) -> None:
    schedule = line.schedule
    console = Console(highlight=False)
    picture = draw_pipeline(line)
    left = len(f"rank {schedule.world_size - 1}") + 2
    room = max(shutil.get_terminal_size((200, 24)).columns, _LEAST_WIDTH + left)
    if picture.width > room:
        picture = draw_pipeline(line, room - left)
    console.width = max(room, picture.width)
    formula = _formula(schedule, t_f, t_b, t_w, link)
    shape = f"{schedule.num_stages} stages on {schedule.world_size} ranks, {schedule.num_microbatches} microbatches"
    say(f"{schedule.name}: {shape}\n\n")
    show(console, picture)
    say(f"\nbubble {line.bubble:.2%}, by the formula {formula}; time {line.time:g}; {line.num_messages} messages")
    held = ", ".join(f"{peak:g}" for peak in line.in_flight)
    say(f"microbatches in flight on each rank: {held}")


def _compare(lines: list[PipelineTimeline], t_f: float, t_b: float, t_w: float, link: float) -> None:
    """A row per schedule. In flight: the rank that holds most, next to the same for 1F1B."""
    first = lines[0].schedule
    usual = max(next(line for line in lines if line.schedule.name == "1f1b").in_flight)
    title = f"\n{first.world_size} ranks, {first.num_microbatches} microbatches"
    table = Table(title=title, title_justify="left")
    for heading in ("schedule", "stages", "bubble", "formula", "time", "messages", "in flight", "/ 1f1b"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for line in lines:
        s, most = line.schedule, max(line.in_flight)
        formula, numbers = _formula(s, t_f, t_b, t_w, link), (f"{line.time:g}", str(line.num_messages))
        ratio = f"{most / usual:.3g}×" if usual else "-"
        table.add_row(s.name, str(s.num_stages), f"{line.bubble:.2%}", formula, *numbers, f"{most:g}", ratio)
    show(Console(highlight=False, width=100), table)
