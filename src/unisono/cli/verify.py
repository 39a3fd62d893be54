"""`unisono verify`: prove a schedule and what ranks execute of it, or show where it goes wrong."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli import options
from unisono.cli.common import FOUND_EXIT, echo, show
from unisono.cli.programs import Placed, prove_placed
from unisono.cli.schedules import Asked, refuse
from unisono.errors import UsageError
from unisono.program import PLACEMENTS
from unisono.program.proof import Proof
from unisono.schedule import PipelineSchedule, Schedule
from unisono.selection import BY_DEFAULT
from unisono.units import parse_nbytes
from unisono.verification import Report, sum_order
from unisono.verification import verify as prove

__all__ = ["verify"]

_Placement = Annotated[
    str | None,
    typer.Option(help=f"Prove programs that move data so: {', '.join(PLACEMENTS)}.", show_default="what runs"),
]
_Program = Annotated[
    bool, typer.Option("--program", help=f"Also prove what every rank executes; always for {BY_DEFAULT}.")
]
_Nbytes = Annotated[
    str | None,
    typer.Option("--bytes", metavar="SIZE", help=f"Of {BY_DEFAULT}, of --program.", show_default="1MiB"),
]


def verify(
    source: options.Source,
    collective: options.Collective = None,
    ranks: options.Ranks = None,
    root: options.Root = None,
    chunks: options.Chunks = None,
    hosts: options.Hosts = None,
    microbatches: options.Microbatches = None,
    per_rank: options.PerRank = None,
    in_flight: Annotated[
        int | None, typer.Option(help="Messages under way per rank.", show_default="as many as it needs")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="One buffer for input and output.")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Also tell which transfers could be left out.")] = False,
    order: Annotated[bool, typer.Option("--order", help="Also tell in which order contributions are summed.")] = False,
    program: _Program = False,
    placement: _Placement = None,
    nbytes: _Nbytes = None,
) -> None:
    """Prove that a schedule does what it says, or show everything that is wrong with it; the same for programs.

    Exit code 0 if it is right, 1 if it is wrong, 2 if it cannot be read. Examples:

        unisono verify my_ring.txt

        unisono draw ring all_reduce -n 4 --text | unisono verify -

        unisono verify 1f1b -n 4 --microbatches 8

        unisono verify default all_reduce -n 4 --bytes 1MiB

        unisono verify columns all_reduce -n 4 --hosts 3+1 --order
    """
    console = Console(highlight=False)
    asked = Asked(source, collective, ranks, root, chunks, microbatches, per_rank, hosts)
    size = parse_nbytes(nbytes or "1MiB")
    program = program or placement is not None
    if source == BY_DEFAULT:
        refuse({"--placement": placement}, "is of schedules: the table of defaults says how data moves")
    elif not program:
        refuse({"--bytes": nbytes}, "is of what ranks execute: give --program as well")
    content = "" if asked.is_name else asked.read()
    if content.startswith("program "):
        _conclude(console, [prove(asked.parse_programs(content), in_place=in_place)])
        return
    placed = asked.find_placed(size) if source == BY_DEFAULT else []
    schedule = placed[0].schedule if placed else asked.find() if asked.is_name else asked.parse(content)
    report = prove(schedule, in_flight, in_place)
    proofs: list[Proof] = []
    if isinstance(schedule, PipelineSchedule) and program:
        raise UsageError(f"{schedule.name} is a pipeline schedule, which has no programs: leave --program out")
    if report and not isinstance(schedule, PipelineSchedule) and (program or placed):
        placed = placed or [Placed(schedule, placement or "", hosts=asked.cut(schedule.world_size))]
        proofs = prove_placed(placed, size, in_place)
    show(console, Text("\n").join(_lines(report, notes)), soft_wrap=True)
    if not report:
        raise typer.Exit(FOUND_EXIT)
    if order:
        echo(_order(schedule))
    _conclude(console, proofs)


def _order(schedule: Schedule | PipelineSchedule) -> str:
    """The order of a collective's sums. Raises UsageError for a pipeline."""
    if isinstance(schedule, PipelineSchedule):
        raise UsageError(f"{schedule.name} is a pipeline schedule, which sums nothing: leave --order out")
    return str(sum_order(schedule))


def _conclude(console: Console, proofs: list[Proof]) -> None:
    """The proofs of programs, the first finding of each drawn; exits with 1 if there is any."""
    for proof in proofs:
        verdict, *rest = str(proof).splitlines()
        lines = [Text(verdict, "green" if proof.ok else "bold red"), *(_line(line, "bold red") for line in rest)]
        if not proof.ok:
            lines += (_line(line, "bold red") for line in proof.draw().splitlines()[1:])
        show(console, Text("\n").join(lines), soft_wrap=True)
    if not all(proof.ok for proof in proofs):
        raise typer.Exit(FOUND_EXIT)


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
