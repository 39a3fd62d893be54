"""`unisono bench weights`: what weight updates cost, beside one flat broadcast and Gloo's loop over the tensors."""

from pathlib import Path
from typing import Annotated

import typer

from unisono.bench.result import Result, Row, this_machine
from unisono.bench.weights import (
    AGAINST,
    WeightSettings,
    header,
    launch_weights,
    line,
    parse_pairs,
    save_weights_plot,
)
from unisono.cli.bench import conclude
from unisono.cli.common import INTERRUPT_EXIT, check_writable, echo, echo_words, listed
from unisono.errors import UsageError

__all__ = ["bench_weights"]

DEFAULT = WeightSettings()


def bench_weights(
    tensors: Annotated[
        str, typer.Option(metavar="NxM,…", help="Models: N tensors of M floats.")
    ] = "300x28000,3000x100",
    replicas: Annotated[str, typer.Option(metavar="N,…", help="Replicas, each of one rank.")] = "1,3,7",
    share: Annotated[bool, typer.Option("--share", help="Also with the trainer's tensors shared.")] = False,
    mapped: Annotated[bool, typer.Option("--mapped", help="Also with mapped replicas.")] = False,
    delta: Annotated[
        str, typer.Option(metavar="SHARE", help="Also delta pushes: 1% of the tensors change, none.")
    ] = "",
    against: Annotated[str, typer.Option(metavar="NAMES", help=f"Of {', '.join(AGAINST)}, by comma.")] = ",".join(
        AGAINST
    ),
    reshard: Annotated[str, typer.Option(metavar="A:B,…", help="Also rows on A ranks to columns on B.")] = "",
    runs: Annotated[int, typer.Option(help="Times each is measured, at most.")] = DEFAULT.runs,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write this, for `compare`.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw the times.")] = None,
) -> None:
    """Measure weight updates: time, share of the machine's bound, what limits, the checksum's share, memory.

    × flat: our time by that of one broadcast of the model's bytes on unisono. gloo ×: the time of Gloo's loop over the
    tensors by ours. beyond: resident memory of all ranks beyond the models. Example:

        unisono bench weights --tensors 300x28000 --replicas 1,3 --mapped --delta 1% --reshard 2:2
    """
    settings = WeightSettings(
        parse_pairs("--tensors", tensors, "x", "300x28000,3000x100"), _numbers(replicas), share, mapped, _share(delta),
        tuple(listed(against)), parse_pairs("--reshard", reshard, ":", "2:2,4:2"), runs,
    )  # fmt: skip
    settings.validate()
    check_writable(json)
    check_writable(plot)
    _run(settings, json, plot)


def _run(settings: WeightSettings, json: Path | None, plot: Path | None) -> None:
    result, pending = Result(vars(settings), this_machine()), list[Row]()
    *words, heading = header(settings, result.machine)
    echo_words("\n".join(words))
    echo(heading)

    def report(row: Row) -> None:
        result.rows.append(row)
        pending.append(row)
        if len(pending) == len(settings.contenders):
            echo(line(settings, pending))
            pending.clear()

    code = 0
    try:
        launch_weights(settings, report)
        result.complete = True
    except KeyboardInterrupt:
        code = INTERRUPT_EXIT
    if result.rows and json is not None:
        result.save(json)
    conclude(result, json, plot, save_weights_plot, code)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, listed(text)))
    except ValueError:
        raise UsageError(f"--replicas is {text!r}, expected numbers such as 1,3,7") from None


def _share(text: str) -> float:
    """``1%`` or ``0.01``; empty: below 0."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1) if text else -1.0
    except ValueError:
        raise UsageError(f"--delta is {text!r}, expected a share of the tensors, such as 1%") from None
