"""Show: schedules and timelines as text, SVG, an animated page, and traces.

    print(draw(schedule))                     a grid of what every rank sends and receives in every step
    draw_svg(schedule, style="circle")        a panel per step; style="rows": one picture, time from left to right
    draw_html(schedule)                       one self-contained page that plays it
    print(draw(timeline))                     a Gantt chart in text
    draw_gantt(timeline)                      the same as SVG
    draw_trace(timeline)                      for chrome://tracing and Perfetto

Chunks have the same colour everywhere. Never imports torch.
"""

from collections.abc import Callable

from unisono.draw.circle import draw_circle
from unisono.draw.gantt import draw_gantt, draw_gantt_text
from unisono.draw.grid import draw_grid
from unisono.draw.html import draw_html
from unisono.draw.picture import Picture
from unisono.draw.rows import draw_rows
from unisono.draw.trace import draw_trace
from unisono.errors import UsageError
from unisono.schedule import Schedule
from unisono.simulate import Timeline

__all__ = ["STYLES", "Picture", "draw", "draw_gantt", "draw_html", "draw_svg", "draw_trace"]

_STYLES: dict[str, Callable[[Schedule], str]] = {"circle": draw_circle, "rows": draw_rows}

STYLES = tuple(_STYLES)

_NARROWEST, _SHORTEST = 20, 8


def draw(subject: Schedule | Timeline, width: int = 80, max_steps: int = 40) -> Picture:
    """A schedule as a text grid, or a timeline as a Gantt chart in text.

    The result prints as plain text and, with rich, in colour. At most `width` characters wide (20 or more) and
    `max_steps` steps long (8 or more); what is left out is noted. Raises UsageError if a timeline has too many events.
    """
    if isinstance(subject, Timeline):
        return draw_gantt_text(subject, max(width, _NARROWEST))
    return draw_grid(subject, max(width, _NARROWEST), max(max_steps, _SHORTEST))


def draw_svg(schedule: Schedule, style: str = "circle") -> str:
    """A schedule as SVG text, on light and dark pages: arrows in the colour of their chunk, dashed if copied.

    style: "circle" (ranks on a circle, a panel per step) or "rows" (a row per rank, time from left to right). Up to
    64 ranks and 64 steps. Raises UsageError for more ranks and for another style.
    """
    if style not in _STYLES:
        raise UsageError(f"unknown style {style!r}: expected one of {', '.join(STYLES)}")
    return _STYLES[style](schedule)
