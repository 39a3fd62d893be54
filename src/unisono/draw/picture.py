"""A drawing in text: plain when turned into a string, coloured when rich prints it."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["Cell", "Picture", "Sheet"]

Cell = list[Text]

_RULED = Box("\n".join(["    ", "    ", " ── ", "    ", "    ", "    ", "    ", "    "]))


@dataclass(frozen=True)
class Picture:
    """Lines of text up to `width` columns wide. `print` it, or rich's Console.print it in colour."""

    body: RenderableType
    width: int

    def __str__(self) -> str:
        stream = StringIO()
        Console(file=stream, width=max(self.width, 1), color_system=None, legacy_windows=False).print(self.body)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.body


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
