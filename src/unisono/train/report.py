"""The output of the job: a progress bar, then tables (of a mesh too), a sample of text and a picture of the loss."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from unisono.drawing.drawing import save_figure
from unisono.train.settings import MeshReport, MeshSettings, Outcome, Settings, StepRecord
from unisono.units import show_count, show_nbytes, show_ranks

__all__ = ["Display", "comparison", "printable", "save_plot", "show_holdings", "show_traffic", "summary"]

PLAIN_LINES = 10
SPLIT_BY = {"pp": "layers", "dp": "sequences", "sp": "positions", "tp": "heads"}


class Display:
    """The progress of one run, to be used as a context manager around it.

    On a terminal it is a live bar; elsewhere, in a log file say, it is a plain line for every tenth of the steps.
    """

    def __init__(self, console: Console, settings: Settings) -> None:
        self.console = console
        self.settings = settings
        self.lines = 0
        self.bar = Progress(
            TextColumn("{task.fields[name]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=settings.steps, name=settings.backend, numbers="starting the ranks")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.bar.stop()

    def show(self, records: list[StepRecord]) -> None:
        """Move the bar on by some steps; the numbers are those of these steps alone."""
        seconds = sum(record.seconds for record in records)
        share = sum(record.sync_seconds for record in records) / seconds
        speed = len(records) * self.settings.tokens_per_step / seconds
        numbers = f"loss {records[-1].loss:.3f} · {speed:,.0f} tokens/s · {share:.0%} communicating"
        step = records[-1].step
        self.bar.update(self.task, completed=step, numbers=numbers)
        if self.bar.disable and step * PLAIN_LINES // self.settings.steps > self.lines:
            self.lines = step * PLAIN_LINES // self.settings.steps
            self.console.print(
                f"{self.settings.backend} {step}/{self.settings.steps} {numbers}", highlight=False, soft_wrap=True
            )


def summary(outcome: Outcome) -> Table:
    """One run in numbers."""
    table = _titled(outcome, outcome.settings.backend)
    for name, value, _ in _rows(outcome):
        table.add_row(name, value)
    return table


def comparison(first: Outcome, second: Outcome) -> Table:
    """Two runs of equal settings on two backends side by side: what differs in the losses and in the times.

    The speed-up is how many times faster the first is than the second.
    """
    settings = first.settings
    table = _titled(first, settings.backend, second.settings.backend, "difference")
    for (name, left, left_value), (_, right, right_value) in zip(_rows(first), _rows(second), strict=True):
        difference = f"{left_value - right_value:+.1e}" if "loss" in name else ""
        table.add_row(name, left, right, difference)
    gap = max(abs(one.loss - other.loss) for one, other in zip(first.records, second.records, strict=True))
    table.add_row("largest difference of the loss in any step", "", "", f"{gap:.1e}")
    name = f"speed-up of a step, {settings.backend} over {second.settings.backend}"
    table.add_row(name, "", "", f"{second.step_seconds / first.step_seconds:.2f}×", style="bold")
    return table


def _titled(outcome: Outcome, *headings: str) -> Table:
    settings = outcome.settings
    title = f"{outcome.text_name}, {show_ranks(settings.ranks)}, {show_count(settings.steps, 'step')}"
    table = Table("", title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _rows(outcome: Outcome) -> list[tuple[str, str, float]]:
    """Name, text and value of each line of a table."""
    whose = "time" if outcome.settings.device == "cpu" else "the host's time"
    final, held_out = outcome.records[-1].loss, outcome.held_out[-1][1]
    return [
        ("parameters", f"{outcome.parameters:,}", outcome.parameters),
        ("training loss, last step (nats per byte)", f"{final:.4f}", final),
        ("held-out loss (nats per byte)", f"{held_out:.4f}", held_out),
        ("byte frequencies alone would give", f"{outcome.unigram_entropy:.4f}", outcome.unigram_entropy),
        ("step time, median (ms)", f"{outcome.step_seconds * 1e3:.1f}", outcome.step_seconds),
        ("tokens per second, all ranks", f"{outcome.tokens_per_second:,.0f}", outcome.tokens_per_second),
        (f"share of {whose} communicating", f"{outcome.sync_share:.1%}", outcome.sync_share),
    ]


def printable(sample: bytes) -> Text:
    """Generated bytes as text that no terminal can take for a command."""
    text = sample.decode(errors="replace")
    return Text("".join(char if char.isprintable() or char == "\n" else "·" for char in text))


def save_plot(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write a PNG of the loss by step and, for several runs, also by seconds spent in training steps.

    Raises UsageError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    panels = min(len(outcomes), 2)
    figure = Figure(figsize=(7.0 * panels, 4.5), layout="constrained")
    settings = outcomes[0].settings
    figure.suptitle(
        f"{outcomes[0].text_name}: {show_ranks(settings.ranks)}, {settings.batch} × {settings.shape.context} bytes"
    )
    for panel, by_time in zip(figure.subplots(1, panels, squeeze=False, sharey=True)[0], (False, True), strict=False):
        for index, outcome in enumerate(outcomes):
            clock = [0.0]
            for record in outcome.records:
                clock.append(clock[-1] + record.seconds if by_time else record.step)
            style = {"color": f"C{index}", "linestyle": "-" if index == 0 else (0, (4, 3))}
            name = outcome.settings.backend
            losses = [record.loss for record in outcome.records]
            panel.plot(clock[1:], losses, linewidth=1, alpha=0.6, label=f"{name}: training", **style)
            steps, held_out = zip(*outcome.held_out, strict=True)
            panel.plot([clock[step] for step in steps], held_out, marker="o", label=f"{name}: held out", **style)
        entropy = outcomes[0].unigram_entropy
        panel.axhline(entropy, color="grey", linestyle=":", label="byte frequencies alone")
        panel.set(xlabel="seconds in training steps" if by_time else "step", ylabel="loss (nats per byte)")
        panel.grid(alpha=0.3)
        panel.legend()
    save_figure(figure, path)


def show_holdings(console: Console, outcome: Outcome) -> None:
    """Print which part each rank has of what is split, how many parameters, and how much it keeps in memory."""
    settings, report = _parts(outcome)
    axes = settings.shape.axes
    table = _table("rank", *axes, *(SPLIT_BY[axis] for axis in axes), "parameters", "states", "activations")
    for rank, share in enumerate(report.shares):
        table.add_row(
            str(rank),
            *(str(share.place[axis]) for axis in axes),
            *(getattr(share, SPLIT_BY[axis]) for axis in axes),
            f"{share.parameters:,}",
            show_nbytes(share.state_nbytes),
            show_nbytes(share.activation_nbytes),
        )
    _print(console, f"who holds what on the mesh {settings.shape}")
    console.print(table)
    _print(console, "states: weights, gradients, optimizer; activations: the most that was kept for backward")


def show_traffic(console: Console, outcome: Outcome) -> None:
    """Print what a rank communicates along each axis, the share of the training time that takes, and the bubble."""
    settings, report = _parts(outcome)
    seconds = sum(record.seconds for record in outcome.records) / len(outcome.records)
    table = _table("axis", "ranks", "calls", "bytes", "share of time")
    for axis, sums in report.traffic.items():
        ranks, share = getattr(settings.shape, axis), sums.seconds / seconds
        table.add_row(axis, str(ranks), f"{sums.calls:.0f}", show_nbytes(sums.nbytes), f"{share:.1%}")
    _print(console, f"communication of a rank in a step on {outcome.settings.backend}, waits included")
    console.print(table)
    if report.bubble is not None:
        measured, predicted = report.bubble
        plan = f"{settings.schedule}, {settings.num_microbatches} microbatches"
        _print(console, f"bubble of {plan}: {measured:.1%} measured, {predicted:.1%} predicted")


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _parts(outcome: Outcome) -> tuple[MeshSettings, MeshReport]:
    assert outcome.settings.mesh is not None, "trained without a mesh"
    assert outcome.mesh is not None, "trained without a mesh"
    return outcome.settings.mesh, outcome.mesh
