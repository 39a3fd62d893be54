"""A drawing: text, coloured where rich or a notebook shows it; or a picture, a page or a trace, to be saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from unisono.errors import file_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Cell", "Drawing", "Sheet", "gap_in", "save_figure", "shown_of"]

Cell = list[Text]

_RULED = Box("\n".join(["    ", "    ", " ── ", "    ", "    ", "    ", "    ", "    "]))


@dataclass(frozen=True, repr=False)
class Drawing:
    """The result of `draw`: `format` is text, svg, html, gantt or trace.

    `print` gives its content, `save` writes it to a file, a notebook shows it; rich prints text in colour, up to
    `width` columns wide.
    """

    format: str
    content: RenderableType
    width: int = 80

    def __str__(self) -> str:
        if isinstance(self.content, str):
            return self.content
        console = self._recorded()
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _recorded(self) -> Console:
        """A console that has printed the content, for itself alone."""
        console = Console(
            file=StringIO(), width=max(self.width, 1), record=True, force_jupyter=False, legacy_windows=False
        )
        console.print(self.content)
        return console

    def __repr__(self) -> str:
        return str(self) if self.format == "text" else f"<{self.format} drawing of {len(str(self)):,} characters>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.content

    def _repr_svg_(self) -> str | None:
        return str(self) if self.format in ("svg", "gantt") else None

    def _repr_html_(self) -> str | None:
        if self.format == "html":
            return f'<iframe srcdoc="{escape(str(self))}" style="width:100%;height:640px;border:0"></iframe>'
        if self.format != "text":
            return None
        return self._recorded().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def save(self, path: str | PathLike[str]) -> Path:
        """Write it to a file, UTF-8; returns the path. Raises UsageError if the file cannot be written."""
        with file_errors(f"write {path}"):
            Path(path).write_text(f"{self}\n" if self.format == "text" else str(self), encoding="utf-8")
        return Path(path)


@dataclass(frozen=True)
class Sheet:
    """A table of cells, each of several lines: names of rows and columns, cells row by row, spaces between columns."""

    corner: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[Cell]]
    gap: int

    @property
    def widths(self) -> list[int]:
        """Characters of every column, that of the row names first, without gaps."""
        named = max(len(self.corner), *map(len, self.rows), 0) if self.rows else len(self.corner)
        cells = ((line.cell_len for row in self.cells for line in row[i]) for i in range(len(self.columns)))
        return [named, *(max(len(name), *found, 0) for name, found in zip(self.columns, cells, strict=True))]

    @property
    def width(self) -> int:
        """Characters of the whole."""
        return sum(self.widths) + self.gap * len(self.columns)

    def broken(self, row: int | None, column: int | None) -> "Sheet":
        """The sheet with a row and a column of dots before the given ones, where something is left out."""
        columns, rows = list(self.columns), list(self.rows)
        cells = [list(line) for line in self.cells]
        if row is not None:
            rows.insert(row, "…")
            cells.insert(row, [[Text("…", "dim")] for _ in columns])
        if column is not None:
            columns.insert(column, "…")
            for line in cells:
                line.insert(column, [Text("…", "dim")])
        return Sheet(self.corner, columns, rows, cells, self.gap)

    def table(self) -> Table:
        """The sheet for rich, with a rule under the names of the columns."""
        # rich puts one space between columns itself, so the padding is one less than the gap
        table = Table(box=_RULED, show_edge=False, padding=(0, self.gap - 1, 0, 0), pad_edge=False, header_style="bold")
        for name, width in zip((self.corner, *self.columns), self.widths, strict=True):
            table.add_column(name, width=width, no_wrap=True, overflow="crop")
        for name, row in zip(self.rows, self.cells, strict=True):
            table.add_row(Text(name, "bold"), *(Text("\n").join(cell) for cell in row))
        return table


def shown_of(total: int, most: int, tail: int) -> list[int]:
    """All of range(total), or the first and the last `tail` of it."""
    return list(range(total)) if total <= most else [*range(most - tail), *range(total - tail, total)]


def gap_in(shown: list[int]) -> int | None:
    """The place at which numbers are left out, if they are: at most one, never the end."""
    return next((i for i, x in enumerate(shown) if x != i), None)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG; raises UsageError if the file cannot be written."""
    with file_errors(f"write {path}"):
        figure.savefig(path, format="png", dpi=120)
