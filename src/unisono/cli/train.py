"""`unisono train`: the main job, a small transformer trained with DDP on N local ranks."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unisono.cli.files import check_writable
from unisono.errors import UsageError
from unisono.train.launch import launch
from unisono.train.report import Display, comparison, printable, save_plot, summary
from unisono.train.settings import BACKENDS, ModelShape, Outcome, Settings, StepRecord
from unisono.train.text import load_corpus

__all__ = ["train"]

DEFAULT = Settings()
CHOICES = " or ".join(BACKENDS)


def train(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", help="Processes to train on; under torchrun, its number.", show_default="4"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File to learn from.", show_default="the language reference inside Python")
    ] = None,
    backend: Annotated[str, typer.Option(help=f"Backend of torch.distributed: {CHOICES}.")] = DEFAULT.backend,
    compare: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Train again on this backend and print both in one table.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step, over all ranks.")] = DEFAULT.batch,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = DEFAULT.learning_rate,
    seed: Annotated[int, typer.Option(help="Same seed, same loss curve.")] = DEFAULT.seed,
    width: Annotated[int, typer.Option(help="Features of the model.")] = DEFAULT.shape.width,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = DEFAULT.shape.layers,
    context: Annotated[int, typer.Option(help="Bytes the model looks back on.")] = DEFAULT.shape.context,
    plot: Annotated[Path, typer.Option(help="Where to write the loss curve, a PNG.")] = Path("unisono-train.png"),
) -> None:
    """Train a small byte-level transformer on a real text with torch's own DDP, on N local ranks.

    It takes under a minute on two cores. Example, which shows what the backend is worth on this machine:

        unisono train --ranks 4 --compare gloo

    Under torchrun each process joins as the rank it is told to be: torchrun --nproc-per-node 4 -m unisono.cli train
    """
    rank, world_size = _place(ranks)
    settings = Settings(
        backend=backend,
        ranks=world_size,
        text=text,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        shape=ModelShape(width=width, layers=layers, context=context),
    )
    runs = _runs(settings, compare)
    load_corpus(text, context)
    check_writable(plot, "the plot")
    outcomes = [_run(run, rank) for run in runs]
    if not rank:
        _report(outcomes, plot)


def _place(ranks: int | None) -> tuple[int | None, int]:
    """This process's rank under torchrun, None when it is to launch the ranks; and the number of ranks."""
    told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if None in told.values():
        return None, DEFAULT.ranks if ranks is None else ranks
    try:
        rank, world_size = (int(value) for value in told.values() if value is not None)
    except ValueError:
        raise UsageError(f"the environment has {told}, expected whole numbers as torchrun sets them") from None
    if ranks not in (None, world_size):
        raise UsageError(f"--ranks is {ranks}, but WORLD_SIZE says {world_size}: leave --ranks out under torchrun")
    return rank, world_size


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
    console.rule("generated text", align="left")
    console.print(printable(outcomes[0].sample), highlight=False)
    console.rule()
    save_plot(plot, outcomes)
    console.print(f"loss curve: {plot}", highlight=False, soft_wrap=True)
