"""A Gantt chart, in SVG and in text: a row per rank with one or two tracks, a bar for work, a gap for a wait.

The same chart shows the messages of a collective (what a rank sends above what it receives) and the actions of a
pipeline; drawing/charts.py says what is in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from unisono.drawing.drawing import Drawing
from unisono.drawing.svg import document, element, text, ticks

__all__ = ["Bar", "Chart", "Row", "Track", "gantt_svg", "gantt_text"]

_LEFT, _TOP, _ROW = 76.0, 70.0, 30.0
_MAX_LINES = 32
_ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that takes time, from `start` to `end`, in the colour `colour`.

    `name` is written into the picture and `names` into the text, the first that fits; `fill` is the rest of the bar in
    text; `title` is shown by a pointer over the bar.
    """

    start: float
    end: float
    colour: str
    title: str
    name: str
    names: tuple[str, ...]
    opacity: float = 1.0
    fill: str = "━"


@dataclass(frozen=True, slots=True)
class Track:
    """Bars one after the other; in text on a line of their own, after `mark`."""

    mark: str
    bars: list[Bar]


@dataclass(frozen=True, slots=True)
class Row:
    """A rank, and in the picture a note at the end of its row."""

    name: str
    tracks: list[Track]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """Rows from `begin` to `until`, which `unit` puts into words; `wide` is the width of the picture's time axis.

    `columns`: characters of the time axis on which every name fits, if that is known. `legend`: (colour, words) for the
    picture, with no colour for what is words alone; `signs` is the same for text, `idle` fills its gaps.
    """

    heading: str
    rows: list[Row]
    begin: float
    until: float
    unit: Callable[[float], str]
    legend: list[tuple[str, str]]
    signs: str
    wide: float = 1000.0
    columns: int = _ANY
    idle: str = " "


def gantt_svg(chart: Chart) -> str:
    """The picture, on light and dark pages."""
    per = chart.wide / (chart.until - chart.begin)
    bottom = _TOP + len(chart.rows) * _ROW
    body = []
    for tick in ticks(chart.until - chart.begin):
        x = _LEFT + tick * per
        body.append(element("line", x1=x, y1=_TOP - 8, x2=x, y2=bottom, class_="line"))
        body.append(text(x, _TOP - 18, chart.unit(tick), "name soft"))
    for i, row in enumerate(chart.rows):
        y = _TOP + i * _ROW
        body.append(
            element("rect", x=_LEFT, y=y + 1, width=chart.wide, height=_ROW - 2, class_="panel", fill_opacity=0.6)
        )
        body.append(text(_LEFT - 12, y + _ROW / 2 + 4, row.name, "right"))
        height = (_ROW - 2 - 2 * len(row.tracks)) / len(row.tracks)
        for k, track in enumerate(row.tracks):
            for bar in track.bars:
                body += _bar(bar, _LEFT + (bar.start - chart.begin) * per, y + 2 + k * (height + 2), per, height)
        if row.note:
            body.append(text(_LEFT + chart.wide + 12, y + _ROW / 2 + 4, row.note, "soft"))
    x = _LEFT
    for colour, words in chart.legend:
        if colour:
            body.append(element("rect", x=x, y=bottom + 11, width=12, height=12, rx=2, fill=colour))
        body.append(text(x + 18 * bool(colour), bottom + 20, words, "soft"))
        x += 40 + 6.4 * len(words)
    margin = 96 if any(row.note for row in chart.rows) else 24
    return document(_LEFT + chart.wide + margin, bottom + 34, chart.heading, body)


def _bar(bar: Bar, x: float, y: float, per: float, height: float) -> list[str]:
    """A bar, named where there is room."""
    width = (bar.end - bar.start) * per
    drawn = element(
        "rect",
        element("title", bar.title),
        x=x,
        y=y,
        width=max(width - 0.8, 0.6),
        height=height,
        rx=2,
        fill=bar.colour,
        fill_opacity=bar.opacity,
    )
    if width < 6.6 * len(bar.name) + 4:
        return [drawn]
    middle = y + height / 2 + 3.5
    if height > 16:
        return [drawn, text(x + width / 2, middle, bar.name, "bar", text_anchor="middle")]
    return [drawn, text(x + 4, middle, bar.name, "bar" if bar.opacity > 0.6 else "thin")]


def gantt_text(chart: Chart, width: int) -> Drawing:
    """A line per track: `c3━━━` is a bar with its name; a bar has at least a character, the later of two covers."""
    shown = chart.rows if len(chart.rows) <= _MAX_LINES else [*chart.rows[: _MAX_LINES - 1], chart.rows[-1]]
    name, mark = max(len(row.name) for row in shown) + 1, max(len(track.mark) for row in shown for track in row.tracks)
    left = name + max(mark, 1)
    columns = max(min(width - left, chart.columns), 10)
    lines = []
    for row in shown:
        for i, track in enumerate(row.tracks):
            start = Text(f"{'' if i else row.name:{name}}{track.mark:{left - name}}")
            lines.append(Text.assemble(start, *_line(track.bars, chart, columns)))
    axis = Text(f"{'':{left}}0{chart.unit(chart.until - chart.begin):>{columns - 1}}", "dim")
    hidden = len(chart.rows) - len(shown)
    notes = [Text(f"ranks {_MAX_LINES - 1} to {_MAX_LINES - 2 + hidden} not shown", "italic")] if hidden else []
    if columns < chart.columns < _ANY:
        notes.append(Text(f"names are cut where they do not fit: {left + chart.columns} columns show all", "italic"))
    heading = Text(chart.heading, "bold")
    body = Group(heading, Text(), *lines, axis, Text(), Text(chart.signs, "dim"), *notes)
    return Drawing("text", body, max(width, left + columns))


def _line(bars: list[Bar], chart: Chart, columns: int) -> list[Text]:
    per = columns / (chart.until - chart.begin)
    spans = []
    for bar in bars:
        start = min(int((bar.start - chart.begin) * per + 1e-6), columns - 1)
        end = int((bar.end - chart.begin) * per + 1e-6)
        if bar.end > bar.start:
            spans.append((start, min(max(end, start + 1), columns), bar))
    spans.sort(key=lambda span: span[0])
    parts, at = [], 0
    for i, (begin, end, bar) in enumerate(spans):
        start = max(begin, at)
        stop = max(min(end, spans[i + 1][0] if i + 1 < len(spans) else columns), start)
        room = stop - start
        name = next((name for name in bar.names if len(name) <= room), "")
        parts += [Text(chart.idle * (start - at), "dim"), Text(name.ljust(room, bar.fill), bar.colour)]
        at = stop
    return [*parts, Text(chart.idle * (columns - at) if chart.idle != " " else "", "dim")]
