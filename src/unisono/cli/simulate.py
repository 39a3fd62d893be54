"""`unisono simulate`: predict how long a schedule takes, what the links carry and what it waits for."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.algorithms import build
from unisono.cli.schedules import find_schedule, say, show
from unisono.errors import UsageError
from unisono.schedule import PRESETS, Topology, cluster, preset
from unisono.simulation import Timeline, simulate
from unisono.units import parse_nbytes, show_nbytes, show_seconds

__all__ = ["network", "simulate_command"]

_ANNOUNCED = "NVIDIA's announcement of double trees (NCCL 2.4, 2019) shows up to 180 times lower latency than rings"


def network(name: str, ranks: int, hosts: int | None) -> Topology:
    """A preset topology, or a cluster of so many hosts. Raises UsageError if the two do not go together."""
    if hosts is None:
        return preset(name, ranks)
    if name != "cluster":
        raise UsageError(f"--hosts is for --topology cluster, not {name}")
    if hosts < 1 or ranks % hosts:
        raise UsageError(f"{ranks} ranks do not divide among {hosts} hosts")
    return cluster(hosts, ranks // hosts)


def simulate_command(
    source: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help="An algorithm, a file, or - for standard input.")
    ] = None,
    collective: Annotated[
        str | None, typer.Argument(help="What the algorithm is to do.", show_default="all_reduce")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="Number of ranks.", show_default="4")] = None,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="E.g. 4, 1KiB, 256MB.", show_default="1MiB")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.", show_default="nvlink; cluster from 9 ranks on")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts of a cluster.", show_default="8 ranks per host")] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Algorithms to compare, by comma; without --bytes, latency.")
    ] = None,
    root: Annotated[int | None, typer.Option(help="Root of the collective, if it has one.", show_default="0")] = None,
    chunks: Annotated[int | None, typer.Option(help="Pieces per block, for pipelining.", show_default="1")] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Latency is spent on the wire and keeps no rank busy.")
    ] = False,
    lines: Annotated[int, typer.Option("--path", min=0, help="Messages of the critical path to print.")] = 12,
) -> None:
    """Predict the time of a schedule on a topology, by latency, bytes, sums and contention.

    Examples, the second one for as many ranks as a large supercomputer has:

        unisono simulate double_tree all_reduce -n 16 --bytes 1MiB --chunks 8

        unisono simulate --ranks 24576 --compare ring,tree,double_tree
    """
    if (source is None) == (compare is None):
        raise UsageError("give one schedule (`unisono simulate ring -n 8`), or several algorithms with --compare")
    if compare is not None:
        count = 4 if ranks is None else ranks
        where = network(topology or _usual(count), count, hosts)
        size = parse_nbytes(nbytes or "4")
        runs = [
            simulate(build(name.strip(), collective or "all_reduce", count, root or 0, chunks or 1), where, size)
            for name in compare.split(",")
        ]
        _compare(runs)
        return
    schedule = find_schedule(str(source), collective, ranks, root, chunks)
    where = network(topology or _usual(schedule.world_size), schedule.world_size, hosts)
    _report(simulate(schedule, where, parse_nbytes(nbytes or "1MiB"), eager=eager), lines)


def _usual(ranks: int) -> str:
    return "nvlink" if ranks <= 8 else "cluster"


def _report(line: Timeline, limit: int) -> None:
    c = line.schedule.collective
    size = "" if c.name == "barrier" else f" of {show_nbytes(line.nbytes)}"
    kinds = line.traffic.by_kind(line.topology).items()
    moved = ", ".join(f"{show_nbytes(nbytes)} over {name}" for name, nbytes in kinds)
    say(f"{line.schedule.name} {c.name}{size} over {c.world_size} ranks: {show_seconds(line.time)}")
    say(f"algbw {line.algbw / 1e9:.3g} GB/s, busbw {line.busbw / 1e9:.3g} GB/s")
    say(f"{line.schedule.num_steps} steps, {line.traffic.num_messages} messages, {moved or 'nothing'} in all")
    say(_constants(line.topology))
    if limit:
        say("\nCritical path")
        say("\n".join(line.critical_path(limit)))


def _constants(topology: Topology) -> str:
    return f"{topology.describe()}; sums {_per_second(topology.gamma)}"


def _per_second(seconds_per_byte: float) -> str:
    return f"at {1e-9 / seconds_per_byte:g} GB/s" if seconds_per_byte else "take no time"


def _compare(runs: Sequence[Timeline]) -> None:
    """Both readings of alpha side by side: the ends of a message wait for it, or only the message does."""
    eager = [simulate(r.schedule, r.topology, r.nbytes, eager=True).time for r in runs]
    last, last_eager = runs[-1], eager[-1]
    c = last.schedule.collective
    size = "" if c.name == "barrier" else f" of {show_nbytes(last.nbytes)}"
    table = Table(title=f"{c.name}{size} over {c.world_size} ranks", title_justify="left")
    for heading in ("algorithm", "steps", "time", f"/ {last.schedule.name}", "eager", f"/ {last.schedule.name}"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right", no_wrap=True)
    for run, fast in zip(runs, eager, strict=True):
        table.add_row(
            run.schedule.name,
            str(run.schedule.num_steps),
            show_seconds(run.time),
            _ratio(run.time, last.time),
            show_seconds(fast),
            _ratio(fast, last_eager),
        )
    show(Console(highlight=False), table)
    say(_constants(last.topology))
    say(
        "time: both ends of a message are busy while it starts up. eager: they are not; latency adds up along the path."
    )
    if {r.schedule.name for r in runs} >= {"ring", "double_tree"} and c.world_size >= 1024:
        say(f"For comparison: {_ANNOUNCED}.")


def _ratio(time: float, other: float) -> str:
    ratio = time / other if other else 0.0
    return "-" if not other else f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.3g}×"
