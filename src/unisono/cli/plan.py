"""`unisono plan`: which algorithm for a collective, at every size, and why; or the one that runs by default."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.algorithms.pipelines import PIPELINE, SCHEDULES, build_pipeline
from unisono.bench.settings import DEVICES
from unisono.cli import options
from unisono.cli.common import echo, echo_words, show
from unisono.cli.programs import DEFAULT_NOTES, default_table, describe_default, show_gpu_table
from unisono.cli.schedules import pipeline_costs, refuse, topology_of
from unisono.cli.simulate import compare_pipelines
from unisono.errors import UsageError, check_known
from unisono.gpu.defaults import TABLE as GPU_TABLE
from unisono.schedule import COLLECTIVES, PRESETS
from unisono.schedule.topology_file import MEASURED
from unisono.selection import Choice, Measured, Selector, explain, ranges
from unisono.simulation import simulate
from unisono.units import parse_nbytes, show_nbytes, show_seconds

__all__ = ["plan"]

_RANKS = 8

_Topology = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(PRESETS)}, {MEASURED}, or a file.",
        show_default="this machine: measured, or shared_memory",
    ),
]
_Collective = Annotated[
    str | None, typer.Argument(help="E.g. all_reduce, broadcast, pipeline; optional with --default.")
]
_Default = Annotated[
    bool, typer.Option("--default", help="What runs if no algorithm is asked for: the table, or its row for --bytes.")
]
_Device = Annotated[
    str | None, typer.Option(help="With --default: cpu, or cuda, also as `unisono tune` has found.", show_default="cpu")
]
_Oversubscribed = Annotated[
    bool | None,
    typer.Option(
        "--oversubscribed/--no-oversubscribed",
        help="More ranks than cores, with --default.",
        show_default="as it is here",
    ),
]


def plan(
    collective: _Collective = None,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="Explain the choice for this size, e.g. 1MiB.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Number of ranks.", show_default=str(_RANKS))
    ] = None,
    topology: _Topology = None,
    hosts: options.Hosts = None,
    model: Annotated[bool, typer.Option("--model", help="By the model, even if this machine was measured.")] = False,
    by_default: _Default = False,
    device: _Device = None,
    oversubscribed: _Oversubscribed = None,
    microbatches: options.Microbatches = None,
    times: options.Times = None,
    link: options.LinkTime = None,
) -> None:
    """Choose an algorithm by collective, size and topology, and say why; or show what runs by default.

    Examples; what `unisono tune` has measured on this machine counts more than the model:

        unisono plan all_reduce --bytes 1MiB --ranks 8

        unisono plan all_reduce --ranks 64 --topology cluster

        unisono plan --default all_reduce --bytes 1MiB --ranks 8

        unisono plan pipeline --ranks 4 --microbatches 16
    """
    if collective == PIPELINE:
        given = {"--bytes": nbytes, "--topology": topology, "--hosts": hosts, "--oversubscribed": oversubscribed}
        given |= {"--device": device, "--model": model or None, "--default": by_default or None}
        refuse(given, "is of collectives: leave it out")
        _pipelines(_RANKS if ranks is None else ranks, 8 if microbatches is None else microbatches, times, link)
        return
    refuse({"--microbatches": microbatches, "--times": times, "--link": link}, "is of pipelines: leave it out")
    if by_default:
        given = {"--topology": topology, "--hosts": hosts, "--model": model or None}
        refuse(given, "is for a choice by cost, the defaults are a table: leave it out")
        _defaults(collective, nbytes, ranks, oversubscribed, device or "cpu")
        return
    for name, value in (("--oversubscribed and --no-oversubscribed", oversubscribed), ("--device", device)):
        refuse({name: value}, f"{'are' if ' ' in name else 'is'} for the defaults: give --default as well")
    if collective is None:
        raise UsageError("which collective? E.g. `unisono plan all_reduce`, or --default for all of them")
    table = Measured.load() if topology is None and not model else None
    known = topology is not None and topology not in PRESETS
    where = topology_of(topology or "shared_memory", _RANKS if ranks is None and not known else ranks, hosts)
    selector = Selector(collective, where, table)
    if nbytes is not None or collective == "barrier":
        echo_words(_indented(explain(selector.choose(parse_nbytes(nbytes or "0")))))
    if collective != "barrier":
        choices = selector.table()
        echo("" if nbytes is not None else selector.topology.describe())
        show(Console(highlight=False), _table(choices))
        echo_words(ranges(choices, selector.crossovers(choices)))
    left_out = selector.choose(0).left_out
    if left_out:
        echo_words("not considered: " + ", ".join(f"{name} ({why})" for name, why in left_out))


def _gpu_defaults(collective: str | None, ranks: int | None) -> None:
    """Prints which calls on GPUs go by which kernels."""
    if collective is not None:
        check_known("collective", collective, tuple(dict.fromkeys(row.collective for row in GPU_TABLE)))
    from unisono.backend.device_facts import no_kernels_here  # imports torch

    show_gpu_table(Measured.load(), ranks or 2, collective)
    if why := no_kernels_here(ranks or 2):
        echo(f"But on this host all calls on GPUs go to NCCL: {why}")


def _pipelines(ranks: int, microbatches: int, times: str | None, link: float | None) -> None:
    """All pipeline schedules on so many ranks, the fastest first."""
    built = [build_pipeline(name, ranks, microbatches) for name in SCHEDULES]
    runs = [simulate(each, costs=pipeline_costs(each, times, link)) for each in built]
    compare_pipelines(sorted(runs, key=lambda run: (run.time, max(run.in_flight))), times, link)


def _indented(lines: list[str]) -> str:
    return "\n  ".join(lines)


def _table(choices: list[Choice]) -> Table:
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
            f"{choice.busbw / 1e9:.3g}" if best.seconds else "-",
            others[0].label if others else "-",
            f"{100 * (others[0].seconds / best.seconds - 1):.0f} %" if others and best.seconds else "-",
        )
    return table


def _defaults(
    collective: str | None, nbytes: str | None, ranks: int | None, oversubscribed: bool | None, device: str
) -> None:  # fmt: skip
    """Prints the defaults: the row for a size, or the table."""
    check_known("--device", device, DEVICES)
    if device == "cuda":
        refuse({"--oversubscribed": oversubscribed, "--bytes": nbytes}, "is for CPUs: leave it out")
        _gpu_defaults(collective, ranks)
        return
    if collective is not None:
        check_known("collective", collective, COLLECTIVES)
    if collective is not None and (nbytes is not None or collective == "barrier"):
        echo_words(_indented(describe_default(collective, nbytes, _RANKS if ranks is None else ranks, oversubscribed)))
        return
    missing = "--bytes" if collective else "COLLECTIVE"
    given = {"--bytes": nbytes, "--ranks": ranks, "--oversubscribed": oversubscribed}
    refuse(given, f"chooses one row of the defaults: give {missing} as well")
    show(Console(highlight=False), default_table(collective))
    echo(f"\n{DEFAULT_NOTES}")
