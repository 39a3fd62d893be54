"""`unisono tune`: measure the algorithms on this machine and keep the table that `unisono plan` reads."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from unisono.bench.settings import DEVICES
from unisono.cli.common import echo, listed, show
from unisono.cli.predicted import Predicted, by_size
from unisono.cli.programs import show_gpu_table
from unisono.errors import UsageError, check_known
from unisono.gpu.defaults import NCCL
from unisono.gpu.devices import count_gpus
from unisono.schedule import COLLECTIVES, preset
from unisono.schedule.topology_file import MEASURED, save_topology
from unisono.selection import BY_DEFAULT, Measured, Push, Row, Selector, ranges
from unisono.tune import GPU_COLLECTIVES, GPU_SIZES, SIZES, runnable, tune_weights
from unisono.tune import tune as measure_all
from unisono.units import parse_nbytes, show_nbytes, show_seconds

__all__ = ["tune"]

_WEIGHTS = "weights"


def tune(
    collective: Annotated[
        list[str] | None,
        typer.Argument(help="What to measure.", show_default="all_reduce; GPUs: all that have kernels"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Processes on this host.", show_default="4; GPUs: all")
    ] = None,
    nbytes: Annotated[
        str | None,
        typer.Option(
            "--bytes", metavar="SIZES", help="By comma.", show_default="64B,1KiB,16KiB,256KiB,4MiB; GPUs: to 16MiB"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: kernels and NCCL, a GPU for each rank.")] = "cpu",
    algorithms: Annotated[
        str | None, typer.Option(metavar="NAMES", help="By comma.", show_default="all that can run")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the table for `unisono plan`.")] = True,
) -> None:
    """Measure every algorithm over shared memory on this machine, in a few seconds per collective and size.

    Beside what was measured stands what a call, a meeting and a byte cost, fitted to two algorithms, predicts for all.
    `weights` measures updates of weights, by which `unisono weights plan` then predicts.

    On GPUs the table also says from then on which calls go by which kernels and which by NCCL.

    unisono tune all_reduce broadcast --ranks 4

    unisono tune weights --ranks 4

    unisono tune --device cuda
    """
    check_known("--device", device, DEVICES)
    on_gpu = device == "cuda"
    wanted = collective or list(GPU_COLLECTIVES if on_gpu else ["all_reduce"])
    for name in wanted:
        check_known("collective", name, GPU_COLLECTIVES if on_gpu else (*COLLECTIVES, _WEIGHTS))
    usual = GPU_SIZES if on_gpu else SIZES
    sizes = [parse_nbytes(size) for size in listed(nbytes)] if nbytes is not None else list(usual)
    world_size = count_gpus(ranks) if on_gpu else 4 if ranks is None else ranks
    if _WEIGHTS in wanted:
        _tune_weights(world_size, keep)
        wanted = [name for name in wanted if name != _WEIGHTS]
        if not wanted:
            return
    names = _checked(algorithms, wanted, [NCCL] if on_gpu else [])
    kept = Measured.load() if keep else None
    table = _measured(wanted, world_size, sizes, names, device)
    for name in wanted:
        _print(name, world_size, table)
    if on_gpu:
        show_gpu_table((kept or Measured()).merged(table), world_size)
    else:
        _predict(wanted, table, world_size, keep)
    if kept is not None:
        echo(f"kept in {kept.merged(table).save()}")


def _measured(wanted: list[str], ranks: int, sizes: list[int], names: list[str] | None, device: str) -> Measured:
    """Measures, and shows what is measured meanwhile."""
    progress = Console(stderr=True, highlight=False)
    with progress.status("starting the ranks ...") as status:

        def report(row: Row) -> None:
            status.update(f"{row.collective} {show_nbytes(row.nbytes)} by {row.algorithm}: {show_seconds(row.seconds)}")

        return measure_all(wanted, ranks, sizes, names, report, device)


def _predict(wanted: list[str], table: Measured, ranks: int, keep: bool) -> None:
    """What is predicted for CPUs stands beside what was measured."""
    predicted = Predicted.of(table, ranks)
    if predicted is not None:
        for name in wanted:
            show(Console(highlight=False), predicted.table(name))
        echo("\n".join(predicted.lines()))
        if keep:
            echo(f"kept in {save_topology(predicted.topology)}, for --topology {MEASURED}")


def _tune_weights(ranks: int, keep: bool) -> None:
    """Measures updates of weights, and prints and keeps what they took."""
    kept = Measured.load() if keep else Measured()
    with Console(stderr=True, highlight=False).status("starting the ranks ...") as status:

        def report(push: Push) -> None:
            status.update(f"{_words(push)} of {show_nbytes(push.nbytes)}: {show_seconds(push.seconds)}")

        table = tune_weights(ranks, report)
    models = sorted({(push.nbytes, push.tensors) for push in table.pushes})
    shown = Table("update", *(f"{n} x {show_nbytes(size // n)}" for size, n in models), title="weights, measured")
    for words in dict.fromkeys(map(_words, table.pushes)):
        times = {(p.nbytes, p.tensors): show_seconds(p.seconds) for p in table.pushes if _words(p) == words}
        shown.add_row(words, *(times[model] for model in models))
    show(Console(highlight=False), shown)
    if keep:
        echo(f"kept in {kept.merged(table).save()}, for `unisono weights plan`")


def _words(push: Push) -> str:
    return f"{push.way}, {push.senders} to {push.ranks - push.senders}"


def _checked(algorithms: str | None, collectives: list[str], others: list[str]) -> list[str] | None:
    if algorithms is None:
        return None
    names = listed(algorithms)
    for name in names:
        known = sorted([BY_DEFAULT, *others, *runnable(*collectives)])
        if name not in known:
            raise UsageError(f"no algorithm {name!r} can run {' or '.join(collectives)}: expected {', '.join(known)}")
    return names


def _print(collective: str, ranks: int, measured: Measured) -> None:
    rows = [r for r in measured.rows if r.collective == collective]
    sizes = sorted({r.nbytes for r in rows})
    best = {size: min(r.seconds for r in rows if r.nbytes == size) for size in sizes}
    cells = {
        (r.algorithm, r.nbytes): show_seconds(r.seconds) + " *" * (r.seconds == best[r.nbytes])
        for r in sorted(rows, key=lambda r: (r.algorithm != BY_DEFAULT, r.algorithm))
    }
    table = by_size(
        f"{collective} over {ranks} ranks, measured", collective, cells, down=any(r.device == "cuda" for r in rows)
    )
    show(Console(highlight=False), table)
    if collective != "barrier" and set(measured.algorithms(collective, ranks)) - {BY_DEFAULT}:
        selector = Selector(collective, preset("shared_memory", ranks), measured)
        choices = selector.table(sizes)
        echo(f"* fastest. Of the algorithms: {ranges(choices, selector.crossovers(choices))}.")
