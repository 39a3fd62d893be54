"""`unisono plan`: which algorithm for a collective, at every size, and why."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.advice import explain, ranges
from unisono.cli.schedules import say, show
from unisono.cli.simulate import network
from unisono.measured import Measured
from unisono.schedule import PRESETS
from unisono.select import Choice, Selector
from unisono.simulate import bus_factor
from unisono.units import parse_nbytes, show_nbytes, show_seconds

__all__ = ["plan"]


def plan(
    collective: Annotated[str, typer.Argument(help="E.g. all_reduce, broadcast, all_to_all.")],
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="Explain the choice for this size, e.g. 1MiB.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Number of ranks.")] = 8,
    topology: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(PRESETS)}.", show_default="this machine: measured, or shared_memory"),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts of a cluster.", show_default="8 ranks per host")] = None,
    model: Annotated[bool, typer.Option("--model", help="By the model, even if this machine was measured.")] = False,
) -> None:
    """Choose an algorithm by collective, size and topology, and say why.

    Examples; what `unisono tune` has measured on this machine counts more than the model:

        unisono plan all_reduce --bytes 1MiB --ranks 8

        unisono plan all_reduce --ranks 64 --topology cluster
    """
    table = Measured.load() if topology is None and not model else None
    selector = Selector(collective, network(topology or "shared_memory", ranks, hosts), table)
    if nbytes is not None or collective == "barrier":
        say("\n".join(_indented(explain(selector.choose(parse_nbytes(nbytes or "0"))))))
    if collective != "barrier":
        choices = selector.table()
        say("" if nbytes is not None else selector.topology.describe())
        show(Console(highlight=False), _table(choices))
        say(ranges(choices, selector.crossovers(choices)))
    left_out = selector.choose(0).left_out
    if left_out:
        say("not considered: " + ", ".join(f"{name} ({why})" for name, why in left_out))


def _indented(lines: list[str]) -> list[str]:
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _table(choices: list[Choice]) -> Table:
    factor = bus_factor(choices[0].collective, choices[0].topology.world_size)
    table = Table(box=None, pad_edge=False, caption="busbw in GB/s", caption_justify="left")
    for heading in ("bytes", "algorithm", "time", "busbw", "next best", "slower by"):
        words = heading in ("algorithm", "next best")
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words, header_style="bold")
    for choice in choices:
        best, others = choice.best, choice.quotes[1:]
        table.add_row(
            show_nbytes(choice.nbytes),
            best.label,
            show_seconds(best.seconds),
            f"{choice.nbytes * factor / best.seconds / 1e9:.3g}" if best.seconds else "-",
            others[0].label if others else "-",
            f"{100 * (others[0].seconds / best.seconds - 1):.0f} %" if others and best.seconds else "-",
        )
    return table
