"""`draw`: schedules, programs and timelines as text, pictures, an animated page, and traces. Never imports torch.

Chunks have the same colour everywhere.
"""

from collections.abc import Sequence

from unisono.drawing.circle import draw_circle
from unisono.drawing.drawing import Drawing
from unisono.drawing.gantt import gantt_svg, gantt_text
from unisono.drawing.grid import draw_grid
from unisono.drawing.html import draw_html
from unisono.drawing.program import draw_program
from unisono.drawing.rows import draw_rows
from unisono.drawing.trace import draw_trace
from unisono.errors import UsageError, check_known
from unisono.program import Program
from unisono.schedule import Hosts, PipelineSchedule, Schedule, Topology, as_hosts
from unisono.simulation import PipelineCosts, PipelineTimeline, Timeline, simulate

__all__ = ["FORMATS", "STYLES", "Drawing", "draw"]

FORMATS = ("text", "svg", "html", "gantt", "trace")
STYLES = ("circle", "rows")

_NARROWEST, _SHORTEST = 20, 8


def draw(
    subject: Schedule | PipelineSchedule | Timeline | PipelineTimeline | Sequence[Program],
    format: str = "text",
    *,
    style: str | None = None,
    topology: str | Topology | None = None,
    nbytes: str | float | None = None,
    costs: PipelineCosts | None = None,
    hosts: int | str | Sequence[Sequence[int]] | None = None,
    width: int = 80,
    max_steps: int = 40,
) -> Drawing:
    """A schedule, a timeline that `simulate` made, or the programs of some ranks; see it by `print` or `.save(path)`.

    | format | of a collective's schedule | of a pipeline's schedule, and of timelines |
    | --- | --- | --- |
    | text | what every rank sends and receives in every step | a Gantt chart |
    | svg | arrows between ranks, on light and dark pages | a Gantt chart |
    | html | a self-contained page that plays it | |
    | gantt | its timeline as a Gantt chart in SVG | the same as svg |
    | trace | its timeline for Perfetto and chrome://tracing, JSON | the same |

    Args:
        subject: what to draw; programs are drawn as text alone.
        format: one of the above.
        style: of a collective's svg: "circle" (a panel per step; the default) or "rows" (a row per rank, time from
            left to right).
        topology: what a collective is simulated on, for gantt and trace; nvlink by default.
        nbytes: its bytes there; by default those that a redistribution has, 1 MiB of any other.
        costs: what the schedule of a pipeline is simulated with.
        hosts: which ranks of a collective share a host, e.g. "2x4" (schedule/hosts.py): boxes of rows, names in text.
        width: characters per line of text, 20 or more; what does not fit is left out, with a note.
        max_steps: steps, or meetings of programs, in text, 8 or more.

    Raises:
        UsageError: the format or style does not exist or does not suit, or there is more than anybody could look at.

    """
    check_known("format", format, FORMATS)
    if style is not None:
        check_known("style", style, STYLES)
    width, max_steps = max(width, _NARROWEST), max(max_steps, _SHORTEST)
    if costs is not None and not isinstance(subject, PipelineSchedule):
        raise UsageError("costs are what the schedule of a pipeline is simulated with: leave them out here")
    if isinstance(subject, PipelineSchedule):
        for what, value in (("style", style), ("topology", topology), ("nbytes", nbytes), ("hosts", hosts)):
            if value is not None:
                raise UsageError(f"{subject.name} is of a pipeline, which has no {what}: leave it out")
        subject = simulate(subject, costs=costs)
    elif isinstance(subject, Schedule):
        cut = as_hosts(hosts, subject.world_size) if hosts is not None else ()
        if format in ("text", "svg", "html"):
            return _draw_schedule(subject, format, style, cut, (width, max_steps))
        subject = simulate(subject, topology or "nvlink", nbytes)
    if isinstance(subject, Timeline | PipelineTimeline):
        return _draw_timeline(subject, format, width)
    if format != "text":
        raise UsageError(f"programs are drawn as text, not as {format}")
    return draw_program(subject, width, max_steps)


def _draw_schedule(schedule: Schedule, format: str, style: str | None, hosts: Hosts, room: tuple[int, int]) -> Drawing:
    """As text, a picture or a page; `room`: characters per line and steps of text."""
    if format == "text":
        return draw_grid(schedule, *room, hosts)
    if format == "html":
        return Drawing(format, draw_html(schedule))
    if hosts and style == "circle":
        raise UsageError("a circle has no boxes for hosts: draw them in style rows")
    return Drawing(format, draw_rows(schedule, hosts) if hosts or style == "rows" else draw_circle(schedule))


def _draw_timeline(timeline: Timeline | PipelineTimeline, format: str, width: int) -> Drawing:
    if format == "html":
        raise UsageError("a page plays the schedule of a collective: draw a timeline or a pipeline as svg")
    if format == "trace":
        return Drawing(format, draw_trace(timeline))
    if format == "text":
        return gantt_text(timeline, width)
    return Drawing(format, gantt_svg(timeline))
