"""A schedule as SVG, ranks on a circle: one panel per step, an arrow per message in the colour of its first chunk."""

from cmath import exp, pi
from math import ceil

from unisono.drawing.colours import chunk_colour
from unisono.drawing.messages import MOST_NODES, MOST_STEPS, Message, shown_steps, title
from unisono.drawing.svg import DASH, Labels, arrow_head, document, element, legend, number, text
from unisono.schedule import Schedule

__all__ = ["draw_circle"]

_PAGE, _MARGIN, _TOP, _HEAD = 1180, 16, 44, 24
_SHORT = 60


class _Ring:
    """The places of the nodes: complex numbers x + y·j around 0, clockwise from the top; switches in the middle.

    ``node``: the radius of a node. ``radius``: of the circle, so that neighbours leave room for an arrow and its label.
    ``panel``: width and height of a panel without its head.
    """

    def __init__(self, ranks: int, switches: int) -> None:
        self.ranks, self.switches = ranks, switches
        self.node = 12.0 if ranks <= 8 else 10.0
        self.radius = max(62.0, ranks * (62.0 if ranks <= 8 else 48.0 if ranks <= 16 else 36.0) / (2 * pi))
        self.panel = 2 * (self.radius + self.node + 18)

    def control(self, src: int, dst: int) -> complex:
        """The point an arrow bends towards: to its left, so that there and back are two lines, and clear of nodes."""
        start, end = self.place(src), self.place(dst)
        left, middle = -1j * (end - start), (start + end) / 2
        if max(src, dst) >= self.ranks or (src - dst) % self.ranks in (1, self.ranks - 1):
            return middle + 0.18 * left
        return middle * 0.65 + 0.13 * left

    def place(self, node: int) -> complex:
        if node < self.ranks:
            return self.radius * -1j * exp(2j * pi * node / self.ranks)
        around = node - self.ranks
        return 0j if self.switches == 1 else self.radius * 0.4 * -1j * exp(2j * pi * (around + 0.5) / self.switches)


def draw_circle(schedule: Schedule) -> str:
    """The picture. Raises UsageError if there are more ranks and switches than MOST_NODES."""
    steps, notes = shown_steps(schedule, MOST_NODES, MOST_STEPS, "a circle")
    ring, num_chunks = _Ring(schedule.world_size, schedule.switches), schedule.collective.num_chunks
    most = max(1, int((_PAGE - _MARGIN) // (ring.panel + _MARGIN)))
    panels = [(f"step {i}", moved) for i, moved in enumerate(steps)] or [("no steps", [])]
    columns = ceil(len(panels) / ceil(len(panels) / most))
    pitch, rise = ring.panel + _MARGIN, ring.panel + _HEAD + _MARGIN
    body = []
    for i, (name, moved) in enumerate(panels):
        x, y = _MARGIN + i % columns * pitch, _TOP + i // columns * rise
        body.append(
            element("g", *_panel(ring, name, moved, num_chunks), transform=f"translate({number(x)} {number(y)})")
        )
    width = max(_MARGIN + columns * pitch, 380.0)
    bottom = _TOP + ceil(len(panels) / columns) * rise
    height = bottom + 28 + 16 * len(notes)
    body += legend(bottom + 8, width, num_chunks)
    return document(width, height, title(schedule), body, notes)


def _panel(ring: _Ring, name: str, moved: list[Message], num_chunks: int) -> list[str]:
    """One step: its name, arrows, and nodes over the ends of the arrows."""
    middle = ring.panel / 2
    alike = {m.chunks for m in moved}
    in_head = len(alike) == 1 and len(moved) > 1
    head = f"{name} · {moved[0].label}" if in_head else name
    labelled = not in_head and len(moved) <= 3 * (ring.ranks + ring.switches)
    labels = Labels((ring.place(node) for node in range(ring.ranks + ring.switches)), ring.node)
    lines = [_arrow(ring, m, chunk_colour(m.chunks[0], num_chunks), labels if labelled else None) for m in moved]
    moved_to = f"translate({number(middle)} {number(middle + _HEAD)})"
    return [
        element("rect", x=0, y=0, width=ring.panel, height=ring.panel + _HEAD, rx=6, class_="panel"),
        text(10, 18, head, "head"),
        element("g", *lines, *_nodes(ring), *labels.parts, transform=moved_to),
    ]


def _nodes(ring: _Ring) -> list[str]:
    parts = []
    for node in range(ring.ranks + ring.switches):
        at, r = ring.place(node), ring.node
        if node < ring.ranks:
            parts.append(element("circle", cx=at.real, cy=at.imag, r=r, class_="node"))
        else:
            parts.append(
                element("rect", x=at.real - r, y=at.imag - r, width=2 * r, height=2 * r, rx=3, class_="switch")
            )
        parts.append(text(at.real, at.imag, str(node), "name"))
    return parts


def _arrow(ring: _Ring, message: Message, colour: str, labels: Labels | None) -> str:
    """A curve and its point; its chunks join the labels."""
    start, end, control = ring.place(message.src), ring.place(message.dst), ring.control(message.src, message.dst)
    out, back = (control - start) / abs(control - start), (control - end) / abs(control - end)
    a, tip = start + out * ring.node, end + back * (ring.node + 1.5)
    b = tip + back * 4
    curve = " ".join(number(x) for point in (control, b) for x in (point.real, point.imag))
    line = element(
        "path",
        d=f"M{number(a.real)} {number(a.imag)}Q{curve}",
        fill="none",
        stroke=colour,
        stroke_width=1.8,
        stroke_dasharray=None if message.reduce else DASH,
    )
    if labels is not None:
        beside = -9j * (end - start) / abs(end - start) if abs(b - a) < _SHORT else 0
        along = (0.5, 0.4, 0.6) if beside else (0.22, 0.3, 0.4, 0.5, 0.6, 0.7, 0.14)
        labels.add(message.label, [(1 - t) ** 2 * a + 2 * t * (1 - t) * control + t**2 * b + beside for t in along])
    return element("g", element("title", str(message)), line, arrow_head(tip, -back, colour))
