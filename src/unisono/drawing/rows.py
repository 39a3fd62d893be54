"""A schedule as SVG, one row per rank and time from left to right: an arrow per message across its step.

Where hosts are given, the ranks of each are neighbours, in a box.
"""

from collections.abc import Mapping

from unisono.drawing.colours import chunk_colour
from unisono.drawing.messages import MOST_NODES, MOST_STEPS, Message, shown_steps, title
from unisono.drawing.svg import DASH, Labels, arrow_head, document, element, legend, text
from unisono.schedule import Hosts, Schedule

__all__ = ["draw_rows"]

_LEFT, _TOP, _ROW, _BAND, _GAP, _DOT, _HOST = 76.0, 72.0, 40.0, 84.0, 10.0, 3.5, 14.0


def draw_rows(schedule: Schedule, hosts: Hosts = ()) -> str:
    """The picture. Raises UsageError if there are more ranks and switches than MOST_NODES."""
    steps, notes = shown_steps(schedule, MOST_NODES, MOST_STEPS, "a picture in rows")
    nodes, num_chunks = schedule.world_size + schedule.switches, schedule.collective.num_chunks
    width = max(_LEFT + len(steps) * _BAND + 16, 380.0)
    rows = _rows(nodes, hosts)
    bottom = max(rows.values()) + 26
    body = [_box(f"host {host}", [rows[rank] for rank in ranks], width) for host, ranks in enumerate(hosts)]
    for node, y in rows.items():
        name = f"rank {node}" if node < schedule.world_size else f"switch {node}"
        body.append(text(_LEFT - 14, y + 4, name, "right"))
        body.append(element("line", x1=_LEFT, y1=y, x2=width - 16, y2=y, class_="line"))
    for i, moved in enumerate(steps):
        body.append(element("g", *_band(i, moved, rows, num_chunks)))
    height = bottom + 40 + 16 * len(notes)
    body += legend(bottom + 20, width, num_chunks)
    return document(width, height, title(schedule), body, notes)


def _rows(nodes: int, hosts: Hosts) -> dict[int, float]:
    """The place of each node from above: rank by rank, or host by host with a gap between, then switches."""
    order = [rank for ranks in hosts for rank in ranks]
    of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    order += [node for node in range(nodes) if node not in of]
    return {node: _TOP + i * _ROW + of.get(node, len(hosts)) * _HOST for i, node in enumerate(order)}


def _box(name: str, rows: list[float], width: float) -> str:
    top, height = min(rows) - _ROW / 2, max(rows) - min(rows) + _ROW
    box = element("rect", x=4.0, y=top, width=width - 12, height=height, rx=6, class_="line")
    return element("g", box, text(10, top + 12, name, "soft thin"))


def _band(step: int, moved: list[Message], rows: Mapping[int, float], num_chunks: int) -> list[str]:
    """One step: a shaded band if its number is even, its name, its arrows, then their labels on top."""
    x, bottom = _LEFT + step * _BAND, max(rows.values()) + 26
    parts = [text(x + _BAND / 2, _TOP - 26, f"step {step}", "name head")]
    if step % 2 == 0:
        shade = element(
            "rect", x=x, y=_TOP - 18, width=_BAND, height=bottom - _TOP + 18, class_="panel", fill_opacity=0.7
        )
        parts.insert(0, shade)
    labels = Labels()
    arrows = [_arrow(x, m, rows, chunk_colour(m.chunks[0], num_chunks), labels) for m in moved]
    return [*parts, *arrows, *labels.parts]


def _arrow(x: float, message: Message, rows: Mapping[int, float], colour: str, labels: Labels) -> str:
    """The arrow, with a dot at its start; its chunks join the labels."""
    start = complex(x + _GAP, rows[message.src])
    tip = complex(x + _BAND - _GAP, rows[message.dst])
    along = (tip - start) / abs(tip - start)
    end = tip - along * 4
    labels.add(message.label, [start + (tip - start) * t for t in (0.25, 0.15, 0.35, 0.45, 0.55, 0.65, 0.75)])
    return element(
        "g",
        element("title", str(message)),
        element(
            "line",
            x1=start.real,
            y1=start.imag,
            x2=end.real,
            y2=end.imag,
            stroke=colour,
            stroke_width=1.8,
            stroke_dasharray=None if message.reduce else DASH,
        ),
        element("circle", cx=start.real, cy=start.imag, r=_DOT, fill=colour),
        arrow_head(tip, along, colour),
    )
