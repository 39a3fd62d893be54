"""Deal the layers of a model out to stages, in order, so that the slowest stage is as fast as it can be. No torch."""

from collections.abc import Sequence
from itertools import accumulate

from unisono.errors import UsageError

__all__ = ["divide_layers"]


def divide_layers(costs: int | Sequence[float], num_stages: int) -> list[range]:
    """Which layers each stage gets: contiguous ranges that cover all layers, each with one layer at least.

    costs: what each layer costs, in any unit, or how many equal layers there are. Of all divisions the one whose
    costliest stage costs least is taken, earlier stages getting more where there is a choice (dynamic programming,
    layers² × stages steps). Raises UsageError if there are more stages than layers, or a cost is below zero.
    """
    each = [1.0] * costs if isinstance(costs, int) else list(costs)
    count = len(each)
    if num_stages < 1 or num_stages > count:
        raise UsageError(f"{count} layers cannot make {num_stages} stages of a layer or more: use 1 to {count} stages")
    if any(not 0 <= cost < float("inf") for cost in each):
        raise UsageError(f"the cost of a layer must not be below zero, got {each}")
    total = [0.0, *accumulate(each)]
    # worst[i] is the cost of the costliest stage when the layers from i on are dealt to the stages still to come
    worst = [total[count] - total[i] for i in range(count)]
    ends: list[list[int]] = [[count] * count]
    for left in range(2, num_stages + 1):
        choices = [_cut(total, worst, i, count - left + 1) if i <= count - left else (count, 0.0) for i in range(count)]
        ends.append([end for end, _ in choices])
        worst = [cost if i <= count - left else float("inf") for i, (_, cost) in enumerate(choices)]
    stages, begin = [], 0
    for row in reversed(ends):
        stages.append(range(begin, row[begin]))
        begin = row[begin]
    return stages


def _cut(total: Sequence[float], worst: Sequence[float], begin: int, last: int) -> tuple[int, float]:
    """Where a stage that begins at a layer should end, at `last` at the latest, and what the costliest then costs."""
    options = [(max(total[end] - total[begin], worst[end]), -end) for end in range(begin + 1, last + 1)]
    cost, end = min(options)
    return -end, cost
