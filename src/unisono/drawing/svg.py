"""The few SVG elements that the drawings are made of, and the look they share, on light and on dark pages."""

from collections.abc import Iterable, Sequence
from math import floor, log10
from xml.sax.saxutils import escape, quoteattr

from unisono.drawing.colours import chunk_colour

__all__ = ["DASH", "Labels", "arrow_head", "document", "element", "legend", "number", "text", "ticks"]

DASH = "5 3"

_TITLE, _CHARACTER = 9.2, 6.4  # widths of a character, generously
_LABEL, _LABEL_HEIGHT = 6.2, 10.0  # a character of a label

_STYLE = """
text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.page { fill: #ffffff } .panel { fill: #f6f8fa } .line { stroke: #d0d7de; fill: none }
.node { fill: #ffffff; stroke: #57606a } .switch { fill: #eaeef2; stroke: #57606a }
.title { font-size: 15px; font-weight: 600 } .head { font-weight: 600 } .soft { fill: #57606a }
.label { font-size: 10px; paint-order: stroke; stroke: #f6f8fa; stroke-width: 3px; stroke-linejoin: round }
.label, .name { text-anchor: middle; dominant-baseline: central } .right { text-anchor: end }
.bar, .thin { font-size: 10px } .bar { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .panel { fill: #161b22 } .line { stroke: #30363d }
  .node { fill: #0d1117; stroke: #8b949e } .switch { fill: #30363d; stroke: #8b949e }
  .soft { fill: #9aa4af } .label { stroke: #161b22 }
}
"""


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{round(value, 1) + 0.0:g}" if abs(value) < 1e5 else f"{value:.0f}"


def element(name: str, *children: str, **attributes: object) -> str:
    """`<name ...>children</name>`; numbers are rounded, `class_` becomes `class`, `stroke_width` `stroke-width`."""
    pairs = ((k.rstrip("_").replace("_", "-"), v) for k, v in attributes.items() if v is not None)
    head = " ".join([name, *(f"{k}={quoteattr(number(v) if isinstance(v, float) else str(v))}" for k, v in pairs)])
    return f"<{head}>{''.join(children)}</{name}>" if children else f"<{head}/>"


def text(x: float, y: float, words: str, kind: str = "", **attributes: object) -> str:
    """A line of text, whose look is one of the classes of the style."""
    return element("text", escape(words), x=float(x), y=float(y), class_=kind or None, **attributes)


def arrow_head(tip: complex, direction: complex, colour: str, size: float = 6.0) -> str:
    """A filled triangle with its point at `tip`, looking along `direction` (x + y·j)."""
    along = direction / (abs(direction) or 1.0) * size
    points = [tip, tip - along + along * 0.5j, tip - along - along * 0.5j]
    return element("path", d="M" + "L".join(f"{number(p.real)} {number(p.imag)}" for p in points) + "Z", fill=colour)


def ticks(whole: float) -> list[float]:
    """Round values from 0 to `whole`, five to ten of them."""
    power = 10.0 ** floor(log10(whole / 5))
    pitch = next(p * power for p in (1.0, 2.0, 5.0, 10.0) if whole / (p * power) <= 10)
    return [pitch * i for i in range(floor(whole / pitch + 1e-9) + 1)]


def legend(y: float, width: float, num_chunks: int) -> list[str]:
    """The legend: solid and dashed arrows, and the colours of the chunks as far as they find room."""
    parts = []
    for x, words, dash in ((16.0, "reduced into what is there", None), (222.0, "copied over it", DASH)):
        parts.append(
            element("line", x1=x, y1=y, x2=x + 28, y2=y, stroke="#8b949e", stroke_width=2, stroke_dasharray=dash)
        )
        parts.append(text(x + 34, y + 4, words, "soft"))
    each = 26 + 7 * len(str(num_chunks))
    for chunk in range(num_chunks) if 360 + each * num_chunks < width else ():
        x = 360.0 + each * chunk
        parts.append(element("rect", x=x, y=y - 4.5, width=9, height=9, rx=2, fill=chunk_colour(chunk, num_chunks)))
        parts.append(text(x + 13, y + 4, f"c{chunk}", "soft"))
    return parts


class Labels:
    """Labels of arrows, each where it covers neither a node nor another label, if there is such a place.

    Points are complex numbers x + y·j.
    """

    def __init__(self, nodes: Iterable[complex] = (), radius: float = 0.0) -> None:
        self.parts: list[str] = []
        self._taken = [(at, radius, radius) for at in nodes]

    def add(self, words: str, places: Iterable[complex]) -> None:
        """Put a label at the first free place, or at the one where it covers least."""
        half = len(words) * _LABEL / 2, _LABEL_HEIGHT / 2
        at = min(places, key=lambda place: round(sum(self._covered(place, *half, taken) for taken in self._taken)))
        self._taken.append((at, *half))
        self.parts.append(text(at.real, at.imag, words, "label"))

    @staticmethod
    def _covered(at: complex, width: float, height: float, taken: tuple[complex, float, float]) -> float:
        """The area that a label around `at` shares with what is there; width and height are halves."""
        other, other_width, other_height = taken
        across = width + other_width - abs(at.real - other.real)
        down = height + other_height - abs(at.imag - other.imag)
        return max(across, 0.0) * max(down, 0.0)


def document(width: float, height: float, title: str, body: Sequence[str], notes: Sequence[str] = ()) -> str:
    """A whole SVG picture on a page of its own, at least as wide as the title above and the notes below."""
    width = max([width, 32 + _TITLE * len(title), *(32 + _CHARACTER * len(note) for note in notes)])
    background = element("rect", x=0, y=0, width=width, height=height, rx=6, class_="page")
    lines = [text(16, height - 14 - 16 * (len(notes) - 1 - i), note, "soft") for i, note in enumerate(notes)]
    parts = [element("style", _STYLE), element("title", escape(title)), background, text(16, 28, title, "title")]
    return (
        element(
            "svg",
            "\n",
            "\n".join([*parts, *body, *lines]),
            "\n",
            xmlns="http://www.w3.org/2000/svg",
            width=number(width),
            height=number(height),
            viewBox=f"0 0 {number(width)} {number(height)}",
            role="img",
        )
        + "\n"
    )
