"""What is told of training on a mesh: who holds what, what goes along each axis, and how long stages were idle."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from unisono.train.settings import MeshSettings, Outcome
from unisono.train.share import MeshReport
from unisono.units import show_nbytes

__all__ = ["show_holdings", "show_traffic"]

SPLIT_BY = {"pp": "layers", "dp": "sequences", "sp": "positions", "tp": "heads"}


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
    _say(console, f"who holds what on the mesh {settings.shape}")
    console.print(table)
    _say(console, "states: weights, gradients, optimizer; activations: the most that was kept for backward")


def show_traffic(console: Console, outcome: Outcome) -> None:
    """Print what a rank communicates along each axis, the share of the training time that takes, and the bubble."""
    settings, report = _parts(outcome)
    seconds = sum(record.seconds for record in outcome.records) / len(outcome.records)
    table = _table("axis", "ranks", "calls", "bytes", "share of time")
    for axis, sums in report.traffic.items():
        ranks, share = getattr(settings.shape, axis), sums.seconds / seconds
        table.add_row(axis, str(ranks), f"{sums.calls:.0f}", show_nbytes(sums.nbytes), f"{share:.1%}")
    _say(console, f"communication of a rank in a step on {outcome.settings.backend}, waits included")
    console.print(table)
    if report.bubble is not None:
        measured, predicted = report.bubble
        plan = f"{settings.schedule}, {settings.num_microbatches} microbatches"
        _say(console, f"bubble of {plan}: {measured:.1%} measured, {predicted:.1%} predicted")


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _parts(outcome: Outcome) -> tuple[MeshSettings, MeshReport]:
    assert outcome.settings.mesh is not None, "trained without a mesh"
    assert outcome.mesh is not None, "trained without a mesh"
    return outcome.settings.mesh, outcome.mesh
