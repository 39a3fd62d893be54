"""A timeline as a Gantt chart, in SVG and in text: a row per rank, what it sends above what it receives."""

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from unisono.draw.colours import chunk_colour
from unisono.draw.picture import Picture
from unisono.draw.svg import document, element, text, ticks
from unisono.errors import UsageError
from unisono.simulate import Timeline
from unisono.units import show_nbytes, show_seconds

__all__ = ["draw_gantt", "draw_gantt_text"]

_LEFT, _TOP, _ROW, _BAR, _WIDE = 76.0, 70.0, 30.0, 12.0, 1000.0
_MAX_NODES, _MAX_EVENTS, _MAX_LINES = 64, 20_000, 32


def draw_gantt(timeline: Timeline) -> str:
    """SVG. Raises UsageError for more than 64 ranks or 20,000 messages, which nobody could tell apart."""
    e, schedule = timeline.events, timeline.schedule
    nodes = schedule.world_size + schedule.switches
    if nodes > _MAX_NODES or len(e) > _MAX_EVENTS:
        raise UsageError(
            f"{schedule.name} over {nodes} ranks makes {len(e)} messages, a chart shows up to {_MAX_NODES} ranks and "
            f"{_MAX_EVENTS} messages: draw fewer ranks, or a trace"
        )
    whole = _until(timeline)
    bottom = _TOP + nodes * _ROW
    body = [part for tick in ticks(whole) for part in _tick(tick, whole, bottom)]
    for node in range(nodes):
        y = _TOP + node * _ROW
        name = f"rank {node}" if node < schedule.world_size else f"switch {node}"
        shade = element("rect", x=_LEFT, y=y + 1, width=_WIDE, height=_ROW - 2, class_="panel", fill_opacity=0.6)
        body += [shade, text(_LEFT - 12, y + _ROW / 2 + 4, name, "right")]
    body += [bar for i in range(len(e)) for bar in _bars(timeline, i, whole)]
    body.append(
        text(
            _LEFT, bottom + 20, "above: sends, below: receives; + reduced into what is there, = copied over it", "soft"
        )
    )
    return document(_LEFT + _WIDE + 24, bottom + 34, _heading(timeline), body)


def _until(timeline: Timeline) -> float:
    """The end of the time axis, in seconds, never zero."""
    return max(timeline.time, float(timeline.events.end.max(initial=0.0))) or 1e-9


def _heading(timeline: Timeline) -> str:
    s = timeline.schedule
    took = f"{show_nbytes(timeline.nbytes)} over {timeline.topology.name} in {show_seconds(timeline.time)}"
    return f"{s.name} {s.collective.name} · {s.world_size} ranks · {took}"


def _tick(at: float, whole: float, bottom: float) -> list[str]:
    x = _LEFT + at / whole * _WIDE
    line = element("line", x1=x, y1=_TOP - 8, x2=x, y2=bottom, class_="line")
    return [line, text(x, _TOP - 18, show_seconds(at), "name soft")]


def _bars(timeline: Timeline, i: int, whole: float) -> list[str]:
    """One message: a bar in the row of its sender and one in that of its receiver, named where there is room."""
    e, num_chunks = timeline.events, timeline.schedule.collective.num_chunks
    first, count, src, dst = int(e.chunk[i]), int(e.count[i]), int(e.src[i]), int(e.dst[i])
    chunks = f"c{first}" if count == 1 else f"c{first}-{first + count - 1}"
    sign, colour = "+" if e.reduce[i] else "=", chunk_colour(first, num_chunks)
    x, width = _LEFT + float(e.start[i]) / whole * _WIDE, float(e.end[i] - e.start[i]) / whole * _WIDE
    span = f"{show_seconds(float(e.start[i]))} to {show_seconds(float(e.end[i]))}"
    told = f"step {e.step[i]}: {src}→{dst} {chunks} {sign}, {show_nbytes(float(e.nbytes[i]))}, {span}"
    parts = []
    for node, down, name in ((src, 2.0, f"→{dst} {chunks} {sign}"), (dst, 16.0, f"←{src} {chunks} {sign}")):
        y = _TOP + node * _ROW + down
        bar = element(
            "rect",
            element("title", told),
            x=x,
            y=y,
            width=max(width - 0.8, 0.6),
            height=_BAR,
            rx=2,
            fill=colour,
            fill_opacity=1.0 if down < 10 else 0.55,
        )
        parts.append(bar)
        if width > 6.6 * len(name) + 4:
            parts.append(text(x + 4, y + 9.5, name, "bar" if down < 10 else "thin"))
    return parts


def draw_gantt_text(timeline: Timeline, width: int) -> Picture:
    """Two lines per rank, what it sends and what it receives: `c3━━━` is reduced there, `c3╌╌╌` copied over."""
    e, schedule = timeline.events, timeline.schedule
    nodes = schedule.world_size + schedule.switches
    shown = list(range(nodes)) if nodes <= _MAX_LINES else [*range(_MAX_LINES - 1), nodes - 1]
    names = [f"rank {n}" if n < schedule.world_size else f"switch {n}" for n in shown]
    left = max(map(len, names)) + 3
    columns, whole = max(width - left, 10), _until(timeline)
    begin = np.minimum((e.start / whole * columns).astype(np.int64), columns - 1)
    end = np.minimum(np.maximum((e.end / whole * columns + 1e-6).astype(np.int64), begin + 1), columns)
    lines = []
    for node, name in zip(shown, names, strict=True):
        for label, arrow, where in ((name, "→", e.src), ("", "←", e.dst)):
            line = [Text(f"{label:{left - 2}}{arrow} "), *_line(timeline, np.flatnonzero(where == node), begin, end)]
            lines.append(Text.assemble(*line))
    axis = Text(" " * left + "0" + show_seconds(whole).rjust(columns - 1), "dim")
    legend = Text("→ sends, ← receives, ━ reduced into what is there, ╌ copied over it", "dim")
    notes = [Text(f"ranks {len(shown) - 1} to {nodes - 2} not shown", "italic")] if len(shown) < nodes else []
    body = Group(Text(_heading(timeline), "bold"), Text(), *lines, axis, Text(), legend, *notes)
    return Picture(body, max(width, left + columns))


def _line(
    timeline: Timeline, events: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> list[Text]:
    """The bars of one line; where two overlap, the later one is seen."""
    e, num_chunks, parts, at = timeline.events, timeline.schedule.collective.num_chunks, [], 0
    order = events[np.argsort(begin[events], kind="stable")]
    next_begin = np.append(begin[order], end.max(initial=0))[1:]
    for i, following in zip(order, next_begin, strict=True):
        stop = max(min(int(end[i]), int(following)), at)
        start = max(int(begin[i]), at)
        room, fill = stop - start, "━" if e.reduce[i] else "╌"
        name = f"c{e.chunk[i]}"
        bar = (name if len(name) <= room else "").ljust(room, fill)
        parts += [Text(" " * (start - at)), Text(bar, chunk_colour(int(e.chunk[i]), num_chunks))]
        at = stop
    return parts
