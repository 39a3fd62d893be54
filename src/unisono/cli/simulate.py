"""`unisono simulate`: predict how long a schedule takes, what the links carry and what it waits for."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.algorithms.pipelines import SCHEDULES, bubble_formula
from unisono.cli import options
from unisono.cli.common import echo, echo_words, listed, show
from unisono.cli.programs import MOST_RANKS, Placed, place_over_hosts
from unisono.cli.schedules import Asked, find_on, pipeline_costs, refuse
from unisono.errors import UsageError
from unisono.schedule import PRESETS, PipelineSchedule, Schedule, Topology
from unisono.schedule.topology_file import MEASURED
from unisono.selection import BY_DEFAULT
from unisono.simulation import PipelineTimeline, Timeline, effort, simulate, simulate_tables
from unisono.units import parse_nbytes, show_nbytes, show_seconds

__all__ = ["compare_pipelines", "simulate_command"]

_ANNOUNCED = "NVIDIA's announcement of double trees (NCCL 2.4, 2019) shows up to 180 times lower latency than rings"


_Topology = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(PRESETS)}, {MEASURED}, or a file.",
        show_default="nvlink; cluster from 9 ranks on",
    ),
]
_Path = Annotated[
    int | None, typer.Option("--path", min=0, help="Messages of the critical path to print.", show_default="12")
]


def simulate_command(
    source: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help=options.NAMED_SOURCE)] = None,
    collective: options.Collective = None,
    ranks: options.Ranks = None,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="E.g. 4, 1KiB, 256MB.", show_default="1MiB")
    ] = None,
    topology: _Topology = None,
    hosts: options.Hosts = None,
    compare: Annotated[
        str | None, typer.Option(metavar="NAMES", help="What to compare, by comma; without --bytes, latency.")
    ] = None,
    root: options.Root = None,
    chunks: options.Chunks = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Latency is spent on the wire and keeps no rank busy.")
    ] = False,
    lines: _Path = None,
    microbatches: options.Microbatches = None,
    per_rank: options.PerRank = None,
    times: options.Times = None,
    link: options.LinkTime = None,
) -> None:
    """Predict the time of a schedule: of a collective by latency, bytes, sums and contention; of a pipeline its bubble.

    Examples, the second one for as many ranks as a large supercomputer has:

        unisono simulate double_tree all_reduce -n 16 --bytes 1MiB --chunks 8

        unisono simulate --ranks 24576 --compare ring,tree,double_tree

        unisono simulate zb-h1 -n 4 --microbatches 8 --times 1,1.2,0.8
    """
    if (source is None) == (compare is None):
        raise UsageError("give one schedule (`unisono simulate ring -n 8`), or several algorithms with --compare")
    named = [str(source)] if compare is None else listed(compare)
    size = parse_nbytes(nbytes or ("1MiB" if compare is None else "4"))
    asked = [Asked(name, collective, ranks, root, chunks, microbatches, per_rank) for name in named]
    found, where = find_on(asked, topology, hosts, size)
    pipelines = [each for each in found if isinstance(each, PipelineSchedule)]
    if pipelines:
        others: dict[str, object] = {"--bytes": nbytes, "--topology": topology, "--hosts": hosts}
        _no_mixture(found, pipelines, others | {"--eager": eager or None, "--path": lines})
        runs = [simulate(each, costs=pipeline_costs(each, times, link)) for each in pipelines]
        if compare is None:
            _report_pipeline(runs[0], times, link)
        else:
            compare_pipelines(runs, times, link)
        return
    refuse({"--times": times, "--link": link}, "is of pipelines: leave it out")
    collectives = [each for each in found if isinstance(each, Schedule)]
    if compare is not None:
        refuse({"--eager": eager or None}, "is a column of --compare anyway: leave it out")
        refuse({"--path": lines}, "is of one schedule, and --compare is a table of several: leave it out")
        _compare([simulate(each, where, size) for each in collectives])
    else:
        line = simulate(collectives[0], where, nbytes and size, eager=eager)
        _report(line, _executed(line, source == BY_DEFAULT), 12 if lines is None else lines)


def _no_mixture(
    found: Sequence[Schedule | PipelineSchedule], pipelines: Sequence[PipelineSchedule], others: dict[str, object]
) -> None:
    """Raises UsageError for pipelines beside algorithms, and for options that pipelines do not have."""
    if len(pipelines) < len(found):
        raise UsageError(f"--compare takes algorithms, or pipeline schedules ({', '.join(SCHEDULES)}), not both")
    refuse(others, f"is of collectives, and {pipelines[0].name} is a pipeline schedule: leave it out")


def _formula(line: PipelineTimeline, times: str | None, link: float | None) -> str:
    """The time by the literature's formula; it knows no links."""
    s = line.schedule
    forward, input_gradient, weight_gradient = (float(time) for time in (times or "1,1,1").split(","))
    value = None if link else bubble_formula(s, forward, input_gradient, weight_gradient)
    return "-" if value is None else f"{value:.2%}"


def _report_pipeline(line: PipelineTimeline, times: str | None, link: float | None) -> None:
    s = line.schedule
    echo(f"{s.name}: {s.num_stages} stages on {s.world_size} ranks, {s.num_microbatches} microbatches")
    formula = _formula(line, times, link)
    echo(f"bubble {line.bubble:.2%}, by the formula {formula}; time {line.time:g}; {line.num_messages} messages")
    echo(f"microbatches in flight on each rank: {', '.join(f'{peak:g}' for peak in line.in_flight)}")


def compare_pipelines(lines: Sequence[PipelineTimeline], times: str | None, link: float | None) -> None:
    """A row per schedule; in flight on the rank that holds most."""
    first = lines[0].schedule
    title = f"{first.world_size} ranks, {first.num_microbatches} microbatches"
    table = Table(title=title, title_justify="left")
    for heading in ("schedule", "stages", "bubble", "formula", "time", "messages", "in flight"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for line in lines:
        numbers = (f"{line.time:g}", str(line.num_messages), f"{max(line.in_flight):g}")
        formula = _formula(line, times, link)
        table.add_row(line.schedule.name, str(line.schedule.num_stages), f"{line.bubble:.2%}", formula, *numbers)
    show(Console(highlight=False, width=100), table)


def _report(line: Timeline, executed: float | None, limit: int) -> None:
    c = line.schedule.collective
    size = "" if c.name == "barrier" else f" of {show_nbytes(line.nbytes)}"
    kinds = line.traffic.by_kind(line.topology).items()
    moved = ", ".join(f"{show_nbytes(nbytes)} over {name}" for name, nbytes in kinds)
    echo(f"{line.schedule.name} {c.name}{size} over {c.world_size} ranks: {show_seconds(line.time)}")
    echo(f"algbw {line.algbw / 1e9:.3g} GB/s, busbw {line.busbw / 1e9:.3g} GB/s")
    echo(f"{line.schedule.num_steps} steps, {line.traffic.num_messages} messages, {moved or 'nothing'} in all")
    echo_words(_constants(line.topology))
    if executed is not None:
        echo(f"as ranks execute it there, by what was measured: {show_seconds(executed)}")
    if limit:
        echo("\nCritical path")
        echo("\n".join(line.critical_path(limit)))


def _executed(line: Timeline, by_default: bool) -> float | None:
    """Seconds of the programs of a schedule on links, or in memory, that were measured; None for other topologies.

    ``by_default``: placed as the backend does if no algorithm is asked for.
    """
    where, c, nbytes = line.topology, line.schedule.collective, round(line.nbytes)
    if c.world_size > MOST_RANKS or line.schedule.switches or c.world_size == 1:
        return None
    if where.hosts == 1 and where.memory is not None:
        return effort(Placed(line.schedule).tables(nbytes), line.nbytes, where.memory.cores).seconds(where.memory)
    if where.hosts > 1 and any(link.announcement for row in where.between for link in row):
        hosts = where.ranks_of_hosts
        placed = place_over_hosts(c.name, nbytes, hosts, c.root) if by_default else Placed(line.schedule, hosts=hosts)
        return float(simulate_tables(placed.tables(nbytes), where).max())
    return None


def _constants(topology: Topology) -> str:
    sums = f"at {1e-9 / topology.gamma:g} GB/s" if topology.gamma else "take no time"
    return f"{topology.describe()}; sums {sums}"


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
    echo_words(_constants(last.topology))
    echo_words(
        "time: both ends of a message are busy while it starts up. eager: they are not; latency adds up along the path."
    )
    if {r.schedule.name for r in runs} >= {"ring", "double_tree"} and c.world_size >= 1024:
        echo_words(f"For comparison: {_ANNOUNCED}.")


def _ratio(time: float, other: float) -> str:
    ratio = time / other if other else 0.0
    return "-" if not other else f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.3g}×"
