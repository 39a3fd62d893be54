"""A plan in words: bytes by rank, buckets, who forwards, predicted time, the bound and the share of it, the drawing."""

from typing import TYPE_CHECKING

from unisono.units import show_count, show_nbytes, show_seconds
from unisono.weights.prediction import Prediction

if TYPE_CHECKING:
    from unisono.weights.plan import Plan

__all__ = ["explain"]


def explain(plan: "Plan", predicted: Prediction) -> str:
    """Several lines of text."""
    senders, ranks = plan.sender.world_size, plan.world_size
    names = {name for fit in plan.fits for name in fit.tensors}
    largest = max((chunk.nbytes for chunk in plan.chunks), default=0)
    lines = [
        f"{show_count(len(names), 'tensor')}, {show_nbytes(plan.nbytes)} from {show_count(senders, 'rank')} to "
        f"{show_count(ranks - senders, 'rank')} of {show_count(len(plan.receivers), 'replica')}",
        f"buckets: {len(plan.chunks)} of at most {show_nbytes(largest)}; forwarding: {_forwarding(plan)}",
        *_table(plan),
    ]
    if plan.chunks:
        where, time, bound = predicted
        share = f"{bound / time:.0%} of the bound" if time else ""
        lines.append(f"predicted on {where}: {show_seconds(time)}; bound: {show_seconds(bound)}; {share}")
    return "\n".join([*lines, "", plan.draw()])


def _forwarding(plan: "Plan") -> str:
    relays = [rank for rank in range(plan.sender.world_size, plan.world_size) if plan.sent[rank]]
    if not relays:
        return "none, the senders send to every receiver"
    return f"{plan.forward}, by ranks {', '.join(map(str, relays))}"


def _table(plan: "Plan") -> list[str]:
    rows = [("rank", "side", "sends", "receives")]
    rows += [
        (str(rank), plan.side(rank), show_nbytes(plan.sent[rank]), show_nbytes(plan.received[rank]))
        for rank in range(plan.world_size)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
