"""`unisono train`: the main job, a small transformer trained with DDP or on a mesh, on N local ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unisono.algorithms.pipelines import SCHEDULES
from unisono.cli.common import check_writable
from unisono.errors import UsageError
from unisono.gpu.devices import count_gpus
from unisono.launch import torchrun_rank
from unisono.parallel.parallel_dims import ParallelDims
from unisono.train.launch import launch
from unisono.train.report import (
    Display,
    comparison,
    printable,
    save_plot,
    show_holdings,
    show_traffic,
    summary,
)
from unisono.train.settings import BACKENDS, MeshSettings, ModelShape, Outcome, Settings, StepRecord
from unisono.train.text import load_corpus

__all__ = ["train"]

DEFAULT = Settings()
CHOICES = "; ".join(f"{device}: {' or '.join(names)}" for device, names in BACKENDS.items())


_on_a_mesh = partial(typer.Option, rich_help_panel="On a mesh of ranks")
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", "-n", help="Processes; under torchrun, its number.", show_default="4; GPUs: all"),
]
Text = Annotated[
    Path | None, typer.Option(help="File to learn from.", show_default="the language reference inside Python")
]
Compare = Annotated[
    str | None, typer.Option(metavar="BACKEND", help="Train again on this backend and print both in one table.")
]
Schedule = Annotated[
    str | None,
    _on_a_mesh(help=f"Of the pipeline: {', '.join(SCHEDULES)}.", show_default="1f1b"),
]
Microbatches = Annotated[
    int | None,
    _on_a_mesh(help="Of a dp rank in a step.", show_default="2 · pp, or 1 without"),
]


def train(
    ranks: Ranks = None,
    text: Text = None,
    backend: Annotated[str, typer.Option(help=f"Backend of torch.distributed: {CHOICES}.")] = DEFAULT.backend,
    device: Annotated[str, typer.Option(help=f"{' or '.join(BACKENDS)}: a GPU for each rank.")] = DEFAULT.device,
    compare: Compare = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step, over all ranks.")] = DEFAULT.batch,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = DEFAULT.learning_rate,
    seed: Annotated[int, typer.Option(help="Same seed, same loss curve.")] = DEFAULT.seed,
    width: Annotated[int, typer.Option(help="Features of the model.")] = DEFAULT.shape.width,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = DEFAULT.shape.layers,
    heads: Annotated[int, typer.Option(help="Attention heads of a block.")] = DEFAULT.shape.heads,
    context: Annotated[int, typer.Option(help="Bytes the model looks back on.")] = DEFAULT.shape.context,
    plot: Annotated[Path, typer.Option(help="Where to write the loss curve, a PNG.")] = Path("unisono-train.png"),
    dp: Annotated[int | None, _on_a_mesh(help="Ranks over which the sequences of a batch are split.")] = None,
    tp: Annotated[
        int | None, _on_a_mesh(help="Ranks over which heads, hidden features and vocabulary are split.")
    ] = None,
    pp: Annotated[int | None, _on_a_mesh(help="Ranks over which layers are split.")] = None,
    sp: Annotated[int | None, _on_a_mesh(help="Ranks over which the positions of a sequence are split.")] = None,
    schedule: Schedule = None,
    microbatches: Microbatches = None,
) -> None:
    """Train a small byte-level transformer on a real text with torch's own DDP, or on a mesh, on N local ranks.

    It takes under a minute on two cores. Examples: what the backend is worth on this machine; three kinds of
    parallelism at once, who holds what, and what each of them communicates.

        unisono train --ranks 4 --compare gloo

        unisono train --dp 2 --tp 2 --pp 2

        unisono train --device cuda --compare nccl

    Under torchrun each process is the rank that torchrun makes it:

        torchrun --nproc-per-node 4 -m unisono.cli train
    """
    rank, given_world_size = torchrun_rank(ranks)
    mesh = _mesh({"dp": dp, "tp": tp, "pp": pp, "sp": sp}, given_world_size, schedule, microbatches)
    settings = Settings(
        ranks=given_world_size if given_world_size is not None else mesh.shape.world_size if mesh else DEFAULT.ranks,
        shape=ModelShape(width, layers, heads, context),
        backend=backend, text=text, steps=steps, batch=batch, learning_rate=learning_rate, seed=seed, mesh=mesh,
        device=device,
    )  # fmt: skip
    runs = _runs(settings, compare)
    if device == "cuda":
        ranks = count_gpus(given_world_size or (mesh.shape.world_size if mesh else None))
        runs = [replace(run, ranks=ranks) for run in runs]
    load_corpus(text, context)
    check_writable(plot, "the plot")
    outcomes = [_run(run, rank) for run in runs]
    if not rank:
        _report(outcomes, plot)


def _mesh(
    axes: dict[str, int | None], ranks: int | None, schedule: str | None, microbatches: int | None
) -> MeshSettings | None:
    """The mesh, if one is asked for; axes that are not named have one rank, dp as many as the others leave."""
    named = {axis: size for axis, size in axes.items() if size is not None}
    if not named:
        for option, value in (("schedule", schedule), ("microbatches", microbatches)):
            if value is not None:
                raise UsageError(f"--{option} is for training on a mesh: give --dp, --tp, --pp or --sp as well")
        return None
    if "dp" not in named and ranks is not None:
        named["dp"] = max(1, ranks // max(1, prod(named.values())))
    return MeshSettings(ParallelDims(**named), schedule or "1f1b", microbatches)


def _runs(settings: Settings, compare: str | None) -> list[Settings]:
    """The checked settings of the one or two runs; one sample of text is enough."""
    settings.check()
    if compare is None:
        return [settings]
    if compare == settings.backend:
        raise UsageError(f"--compare {compare} is the backend already in use: name the other one")
    other = replace(settings, backend=compare, sample_bytes=0)
    other.check()
    return [settings, other]


def _run(settings: Settings, rank: int | None) -> Outcome:
    """Launch local ranks (rank None) or be one; only the launcher and rank 0 show progress."""
    if rank:
        return _join(settings, rank, lambda records: None)
    with Display(Console(stderr=True), settings) as display:
        return launch(settings, display.show) if rank is None else _join(settings, rank, display.show)


def _join(settings: Settings, rank: int, on_steps: Callable[[list[StepRecord]], None]) -> Outcome:
    """Train as one rank of a job that somebody else has started."""
    from unisono.train.job import run_rank

    return run_rank(settings, rank, "env://", on_steps)


def _report(outcomes: list[Outcome], plot: Path) -> None:
    console = Console()
    console.print(comparison(*outcomes) if len(outcomes) == 2 else summary(outcomes[0]))
    if outcomes[0].mesh is not None:
        show_holdings(console, outcomes[0])
        for outcome in outcomes:
            show_traffic(console, outcome)
    console.rule("generated text", align="left")
    console.print(printable(outcomes[0].sample), highlight=False)
    console.rule()
    save_plot(plot, outcomes)
    console.print(f"loss curve: {plot}", highlight=False, soft_wrap=True)
