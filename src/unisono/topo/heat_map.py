"""The links between hosts as a matrix, from row to column: in the terminal, as a page, as a picture.

Darker is better: less time, more bytes. Colours go by the logarithm, from the best to the worst link of a matrix.
"""

from collections.abc import Iterator, Sequence
from html import escape
from math import log
from pathlib import Path
from typing import NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unisono.drawing.drawing import save_figure
from unisono.drawing.html import html_page
from unisono.topo.facts import Facts
from unisono.topo.links import LinkCost
from unisono.units import show_nbytes, show_ranks, show_seconds

__all__ = ["Links", "Matrix", "describe", "heading", "matrices", "page", "save_picture", "show_rate", "table"]

Links = dict[str, dict[str, LinkCost | str]]
"""By the names of hosts: what the link from one to another costs, or why it was not measured."""
_BEST, _WORST, _FAILED = (0x0B, 0x3D, 0x91), (0xDD, 0xE8, 0xF6), "#c2334d"
_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; max-width: 70rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem } pre { overflow-x: auto }
table { border-collapse: collapse } th, td { padding: .35rem .8rem; text-align: right } .own { opacity: .35 }
th { font-weight: 600 } dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.5rem }
dt { opacity: .65 } dd { margin: 0 }
"""


class Matrix(NamedTuple):
    """One quantity of all links: a row per sender. A shade is 0 (best) to 1, None where there is no number."""

    title: str
    names: list[str]
    texts: list[list[str]]
    shades: list[list[float | None]]


def show_rate(beta: float) -> str:
    """A bandwidth as people write it: ``941 Mbit/s``, ``9.4 Gbit/s``."""
    bits = 8 / beta
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 0.9995e9 else f"{bits / 1e6:.3g} Mbit/s"


def matrices(names: Sequence[str], links: Links) -> list[Matrix]:
    """Latency and bandwidth."""
    return [
        _matrix("latency (half a round trip of 64 B)", names, links, "alpha"),
        _matrix("bandwidth", names, links, "beta"),
    ]


def _matrix(title: str, names: Sequence[str], links: Links, quantity: str) -> Matrix:
    costs = [[links.get(a, {}).get(b, "not measured") if a != b else "" for b in names] for a in names]
    values = [[getattr(c, quantity) if isinstance(c, LinkCost) else 0.0 for c in row] for row in costs]
    known = [value for row in values for value in row if value]
    low, high = (log(min(known)), log(max(known))) if known else (0.0, 0.0)
    show = show_seconds if quantity == "alpha" else show_rate
    texts = [
        [show(value) if value else "·" if cost == "" else "✗" for value, cost in zip(row, cells, strict=True)]
        for row, cells in zip(values, costs, strict=True)
    ]
    width = max(high - low, log(2))  # links that differ by less look alike
    shades = [[(log(value) - low) / width if value else None for value in row] for row in values]
    return Matrix(title, list(names), texts, shades)


def _colours(shade: float | None, text: str) -> tuple[str, str]:
    """Background and ink of a cell; empty for one without a link."""
    if shade is None:
        return ("", "") if text != "✗" else (_FAILED, "#ffffff")
    mixed = (round(best + (worst - best) * shade) for best, worst in zip(_BEST, _WORST, strict=True))
    return f"#{bytes(mixed).hex()}", "#ffffff" if shade < 0.55 else "#10243f"


def table(matrix: Matrix) -> Group:
    """For the terminal."""
    drawn = Table(box=None, padding=(0, 0))
    drawn.add_column("from \\ to ", style="dim")
    for name in matrix.names:
        drawn.add_column(f" {name} ", justify="right", no_wrap=True)
    for name, texts, shades in zip(matrix.names, matrix.texts, matrix.shades, strict=True):
        cells = []
        for text, shade in zip(texts, shades, strict=True):
            ground, ink = _colours(shade, text)
            cells.append(Text(f" {text} ", f"{ink} on {ground}" if ground else "dim"))
        drawn.add_row(f"{name} ", *cells)
    return Group(Text(matrix.title, "bold"), drawn)


def describe(host: Facts) -> Iterator[tuple[str, str]]:
    """What a host is and has, as names and words."""
    limit = f", of which its container gets {host.quota:g}" if host.quota else ""
    yield "cores", f"{host.allowed_cores} of {host.cores}{limit}"
    memory = show_nbytes(host.memory)
    yield "memory", memory if host.memory_limit < 0 else f"{memory}, limited to {show_nbytes(host.memory_limit)}"
    for node, cores in host.numa.items():
        yield f"NUMA {node}", f"cores {cores}"
    for cache, sharing in host.caches.items():
        yield cache, f"shared by cores {', '.join(sharing)}" if len(sharing) < 9 else f"{len(sharing)} of them"
    for each in host.interfaces:
        if each.addresses and not each.loopback:
            speed = f", {each.speed / 1000:g} Gbit/s by its driver" if each.speed else ""
            here = ", towards the others" if each.name == host.towards_interface else ""
            yield each.name, f"{', '.join(each.addresses)}, MTU {each.mtu}, {each.state}{speed}{here}"
    for port, state in host.infiniband.items():
        yield f"InfiniBand {port}", state
    for gpu in host.gpus:
        yield "GPU", gpu


def heading(host: Facts, name: str) -> str:
    """The name of a host and how many ranks it has."""
    return f"{name}, {show_ranks(host.local_world_size)}" if host.launcher else name


def page(hosts: Sequence[Facts], names: dict[str, str], drawn: Sequence[Matrix]) -> str:
    """Everything as one self-contained page, UTF-8 text."""
    parts = [f"<h1>{escape(_title(hosts))}</h1>"]
    for matrix in drawn:
        head = "".join(f"<th>{escape(name)}</th>" for name in matrix.names)
        rows = [
            f"<tr><th>{escape(name)}</th>{''.join(map(_cell, texts, shades))}</tr>"
            for name, texts, shades in zip(matrix.names, matrix.texts, matrix.shades, strict=True)
        ]
        parts += [f"<h2>{escape(matrix.title)}</h2><table><tr><th>from \\ to</th>{head}</tr>{''.join(rows)}</table>"]
    for host in hosts:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in describe(host))
        parts += [f"<h2>{escape(heading(host, names[host.key]))}</h2><dl>{facts}</dl>"]
        parts += [f"<pre>{escape(host.gpu_links)}</pre>"] if host.gpu_links else []
    return html_page("unisono topo", _STYLE, *parts)


def _title(hosts: Sequence[Facts]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in hosts[0].versions.items())
    return f"{len(hosts)} host{'s' * (len(hosts) > 1)} · {versions}"


def _cell(text: str, shade: float | None) -> str:
    ground, ink = _colours(shade, text)
    look = f' style="background:{ground};color:{ink}"' if ground else ' class="own"'
    return f"<td{look}>{escape(text)}</td>"


def save_picture(path: Path, hosts: Sequence[Facts], drawn: Sequence[Matrix]) -> None:
    """Write a PNG with a panel per matrix. Raises UsageError if the file cannot be written."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    side = 2.2 + 0.9 * len(hosts)
    figure = Figure(figsize=(side * len(drawn), side + 0.8), layout="constrained")
    figure.suptitle(_title(hosts), fontsize=10)
    for axes, matrix in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        cells = [zip(*row, strict=True) for row in zip(matrix.shades, matrix.texts, strict=True)]
        axes.imshow([[to_rgb(_colours(*cell)[0] or "#f2f2f2") for cell in row] for row in cells])
        axes.set_title(matrix.title, fontsize=10)
        axes.set_xticks(range(len(matrix.names)), matrix.names, fontsize=8)
        axes.set_yticks(range(len(matrix.names)), matrix.names, fontsize=8)
        axes.set_xlabel("to", fontsize=8)
        axes.set_ylabel("from", fontsize=8)
        for y, (texts, shades) in enumerate(zip(matrix.texts, matrix.shades, strict=True)):
            for x, (text, shade) in enumerate(zip(texts, shades, strict=True)):
                ink = _colours(shade, text)[1] or "#888888"
                axes.text(x, y, "no link" if text == "✗" else text, ha="center", va="center", color=ink, fontsize=8)
    save_figure(figure, path)
