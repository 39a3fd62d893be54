"""`unisono verify`: prove a schedule, or show where it goes wrong."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli.schedules import find_schedule, show
from unisono.verify import Report
from unisono.verify import verify as prove

__all__ = ["WRONG_EXIT", "verify"]

WRONG_EXIT = 1


def verify(
    source: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A file, - for standard input, or an algorithm.")],
    collective: Annotated[
        str | None, typer.Argument(help="What the algorithm is to do.", show_default="all_reduce")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="Number of ranks.", show_default="4")] = None,
    root: Annotated[
        int | None, typer.Option(help="Root of a broadcast, reduce, gather or scatter.", show_default="0")
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Pieces per block, for pipelining.", show_default="1")] = None,
    in_flight: Annotated[
        int | None, typer.Option(help="Messages under way per rank.", show_default="as many as it needs")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="One buffer for input and output.")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Also tell which transfers could be left out.")] = False,
) -> None:
    """Prove that a schedule does what it says, or show everything that is wrong with it.

    Exit code 0 if it is right, 1 if it is wrong, 2 if it cannot be read. Examples:

        unisono verify my_ring.txt

        unisono draw ring all_reduce -n 4 --text | unisono verify -
    """
    report = prove(find_schedule(source, collective, ranks, root, chunks), in_flight, in_place)
    show(Console(highlight=False), Text("\n").join(_lines(report, notes)), soft_wrap=True)
    if not report.ok:
        raise typer.Exit(WRONG_EXIT)


def _lines(report: Report, notes: bool) -> Iterator[Text]:
    """The report line by line: the verdict green or red, kinds of findings bold, arrows red."""
    verdict, *rest = str(report).splitlines()
    yield Text(verdict, "green" if report.ok else "bold red")
    for line in rest:
        yield _line(line, "bold red")
    for note in report.notes if notes else ():
        yield Text()
        for line in str(note).splitlines():
            yield _line(line, "yellow")


def _line(line: str, style: str) -> Text:
    text = Text(line)
    if not line.startswith(" "):
        text.stylize(style, 0, line.find(":") + 1)
    elif line.lstrip().startswith("^"):
        text.stylize(style)
    return text
