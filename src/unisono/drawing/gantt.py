"""A Gantt chart, in SVG and in text: a row per rank with one or two tracks, a bar for work, a gap for a wait.

It shows the messages of a simulated collective, what a rank sends above what it receives, or the actions of a pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from unisono.drawing.colours import chunk_colour
from unisono.drawing.drawing import Drawing
from unisono.drawing.messages import chunk_range
from unisono.drawing.svg import document, element, text, ticks
from unisono.errors import UsageError
from unisono.simulation import PipelineTimeline, Slot, Timeline
from unisono.units import show_nbytes, show_seconds

__all__ = ["gantt_svg", "gantt_text", "pipeline_heading"]

_LEFT, _TOP, _ROW = 76.0, 70.0, 30.0
_MAX_LINES = 32
_ANY = 1 << 30
_MAX_NODES, _MAX_BARS = 64, 20_000
_KINDS = {
    "F": ("forward", chunk_colour(0, 1)),
    "B": ("input gradient", chunk_colour(5, 7)),
    "W": ("weight gradient", chunk_colour(4, 9)),
    "BW": ("both gradients", chunk_colour(5, 7)),
}
_PER_ACTION, _WIDEST = 20.0, 3000.0  # of the picture of a pipeline


@dataclass(frozen=True, slots=True)
class _Bar:
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
class _Row:
    """A rank. `tracks`: bars one after the other, in text on a line after a mark. `note`: of the picture."""

    name: str
    tracks: list[tuple[str, list[_Bar]]]
    note: str = ""


@dataclass(frozen=True)
class _Chart:
    """Rows from `begin` to `until`, which `unit` puts into words; `wide` is the width of the picture's time axis.

    `columns`: characters of the time axis on which every name fits, if that is known. `legend`: (colour, words) for the
    picture, with no colour for what is words alone; `signs` is the same for text, `idle` fills its gaps.
    """

    heading: str
    rows: list[_Row]
    begin: float
    until: float
    unit: Callable[[float], str]
    legend: list[tuple[str, str]]
    signs: str
    wide: float = 1000.0
    columns: int = _ANY
    idle: str = " "


def _chart_of(timeline: Timeline | PipelineTimeline, picture: bool) -> _Chart:
    """The chart. Raises UsageError for more bars, or in a picture more ranks, than anybody could tell apart."""
    return _messages(timeline, picture) if isinstance(timeline, Timeline) else _actions(timeline)


def _messages(timeline: Timeline, picture: bool) -> _Chart:
    """Two tracks per rank, what it sends and what it receives."""
    e, s = timeline.events, timeline.schedule
    nodes, num_chunks = s.world_size + s.switches, s.collective.num_chunks
    if picture and (nodes > _MAX_NODES or len(e) > _MAX_BARS):
        raise UsageError(
            f"{s.name} over {nodes} ranks makes {len(e)} messages, a chart shows up to {_MAX_NODES} ranks and "
            f"{_MAX_BARS} messages: draw fewer ranks, or a trace"
        )
    sends: list[list[_Bar]] = [[] for _ in range(nodes)]
    receives: list[list[_Bar]] = [[] for _ in range(nodes)]
    for i in range(len(e)):
        first, src, dst = int(e.chunk[i]), int(e.src[i]), int(e.dst[i])
        start, end, chunks = float(e.start[i]), float(e.end[i]), chunk_range(first, int(e.count[i]))
        sign, fill = ("+", "━") if e.reduce[i] else ("=", "╌")
        span = f"{show_seconds(start)} to {show_seconds(end)}"
        title = f"step {e.step[i]}: {src}→{dst} {chunks} {sign}, {show_nbytes(float(e.nbytes[i]))}, {span}"
        for tracks, node, name, opacity in ((sends, src, f"→{dst}", 1.0), (receives, dst, f"←{src}", 0.55)):
            name, colour = f"{name} {chunks} {sign}", chunk_colour(first, num_chunks)
            tracks[node].append(_Bar(start, end, colour, title, name, (f"c{first}",), opacity, fill))
    names = [f"rank {n}" if n < s.world_size else f"switch {n}" for n in range(nodes)]
    rows = [_Row(name, [("→ ", sends[n]), ("← ", receives[n])]) for n, name in enumerate(names)]
    took = f"{show_nbytes(timeline.nbytes)} over {timeline.topology.name} in {show_seconds(timeline.time)}"
    return _Chart(
        f"{s.name} {s.collective.name} · {s.world_size} ranks · {took}",
        rows,
        0.0,
        max(timeline.time, float(e.end.max(initial=0.0))) or 1e-9,
        show_seconds,
        [("", "above: sends, below: receives; + reduced into what is there, = copied over it")],
        "→ sends, ← receives, ━ reduced into what is there, ╌ copied over it",
    )


def _actions(timeline: PipelineTimeline) -> _Chart:
    """One track per rank; of several stages on a rank the later ones are paler."""
    slots = [slot for row in timeline.slots for slot in row]
    if len(slots) > _MAX_BARS:
        raise UsageError(f"{len(slots)} actions are too many to draw, {_MAX_BARS} is the most: draw fewer microbatches")
    begin, until = min((s.start for s in slots), default=0.0), max((s.end for s in slots), default=1.0)
    until = until if until > begin else begin + 1.0
    lengths = [s.end - s.start for s in slots if s.end - s.start > (until - begin) / 1000]
    shortest = min(lengths, default=until - begin)
    rows = []
    for rank, row in enumerate(timeline.slots):
        stages = timeline.schedule.stages_of(rank)
        bars = [_action(slot, stages) for slot in row]
        rows.append(_Row(f"rank {rank}", [(" ", bars)], f"{timeline.bubbles[rank]:.1%} idle"))
    used = {slot.action.kind for slot in slots}
    legend = [(colour, f"{kind} {name}") for kind, (name, colour) in _KINDS.items() if kind in used]
    named = max((len(str(slot.action)) for slot in slots), default=1)
    return _Chart(
        pipeline_heading(timeline),
        rows,
        begin,
        until,
        lambda time: f"{time:.6g}",
        [*legend, ("", "numbers are microbatches; paler: the rank's later stages")],
        ", ".join(["stage, kind, microbatch", *(words for _, words in legend), "· idle"]),
        min(max((until - begin) / shortest * _PER_ACTION, 1000.0), _WIDEST),
        round((until - begin) / shortest * (named + 1)),
        "·",
    )


def _action(slot: Slot, stages: tuple[int, ...]) -> _Bar:
    action, (what, colour) = slot.action, _KINDS[slot.action.kind]
    title = (
        f"{action}: {what} of stage {action.stage}, microbatch {action.microbatch}, {slot.start:.6g} to {slot.end:.6g}"
    )
    opacity = 1.0 - 0.35 * stages.index(action.stage) / max(len(stages) - 1, 1)
    names = (f"{action}━", action.kind, action.kind[:1])
    return _Bar(slot.start, slot.end, colour, title, str(action.microbatch), names, opacity)


def pipeline_heading(timeline: PipelineTimeline) -> str:
    """One line: what the schedule is, and its bubble."""
    s = timeline.schedule
    stages = f"{s.num_stages} stages" + (f" on {s.world_size} ranks" if s.num_stages != s.world_size else "")
    return f"{s.name} · {stages} · {s.num_microbatches} microbatches · bubble {timeline.bubble:.1%}"


def gantt_svg(timeline: Timeline | PipelineTimeline) -> str:
    """The picture, on light and dark pages. Raises UsageError for too many bars or ranks."""
    chart = _chart_of(timeline, picture=True)
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
        for k, (_, bars) in enumerate(row.tracks):
            for bar in bars:
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


def _bar(bar: _Bar, x: float, y: float, per: float, height: float) -> list[str]:
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


def gantt_text(timeline: Timeline | PipelineTimeline, width: int) -> Drawing:
    """A line per track: `c3━━━` is a bar with its name; a bar has at least a character, the later of two covers.

    Raises UsageError for too many actions.
    """
    chart = _chart_of(timeline, picture=False)
    shown = chart.rows if len(chart.rows) <= _MAX_LINES else [*chart.rows[: _MAX_LINES - 1], chart.rows[-1]]
    name, wide = max(len(row.name) for row in shown) + 1, max(len(mark) for row in shown for mark, _ in row.tracks)
    left = name + max(wide, 1)
    columns = max(min(width - left, chart.columns), 10)
    lines = []
    for row in shown:
        for i, (mark, bars) in enumerate(row.tracks):
            start = Text(f"{'' if i else row.name:{name}}{mark:{left - name}}")
            lines.append(Text.assemble(start, *_line(bars, chart, columns)))
    axis = Text(f"{'':{left}}0{chart.unit(chart.until - chart.begin):>{columns - 1}}", "dim")
    hidden = len(chart.rows) - len(shown)
    notes = [Text(f"ranks {_MAX_LINES - 1} to {_MAX_LINES - 2 + hidden} not shown", "italic")] if hidden else []
    if columns < chart.columns < _ANY:
        notes.append(Text(f"names are cut where they do not fit: {left + chart.columns} columns show all", "italic"))
    heading = Text(chart.heading, "bold")
    body = Group(heading, Text(), *lines, axis, Text(), Text(chart.signs, "dim"), *notes)
    return Drawing("text", body, max(width, left + columns))


def _line(bars: list[_Bar], chart: _Chart, columns: int) -> list[Text]:
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
