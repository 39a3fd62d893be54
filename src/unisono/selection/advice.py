"""A choice in words: what to use, why, what else there is, and where the choice changes with the size."""

from collections.abc import Sequence

from unisono.selection.selector import Choice, Crossover, Quote
from unisono.units import show_count, show_nbytes, show_seconds

__all__ = ["explain", "ranges"]

_WHY = {
    "start-up": "start-up of messages dominates, so few steps win",
    "bytes": "bytes on the wire dominate, so what the busiest link carries decides",
    "sums": "adding up dominates, so it pays to share the sums among the ranks",
}


def explain(choice: Choice, others: int = 4) -> list[str]:
    """Lines: the pick, the reason, then the next best with their factor, steps and bytes."""
    best = choice.best
    what = (
        choice.collective if choice.collective == "barrier" else f"{choice.collective} of {show_nbytes(choice.nbytes)}"
    )
    source = "as measured here" if best.measured else "by the model"
    lines = [
        f"{what} over {choice.topology.world_size} ranks: {best.label}, {show_seconds(best.seconds)} {source}",
        f"on {choice.topology.describe()}",
        _reason(choice),
    ]
    for quote in choice.quotes[1 : others + 1]:
        factor = quote.seconds / best.seconds if best.seconds else 1.0
        lines.append(
            f"{quote.label} takes {show_seconds(quote.seconds)}, {factor:.3g} times as long: {_costs(choice, quote)}"
        )
    return lines


def _reason(choice: Choice) -> str:
    best = choice.best
    if best.measured:
        return f"because it was the fastest measured: {_costs(choice, best)}"
    if choice.topology.world_size == 1:
        return "because one rank has nobody to talk to"
    shares = choice.shares
    total = sum(shares.values()) or 1.0
    biggest = max(shares, key=shares.__getitem__)
    spent = ", ".join(f"{100 * part / total:.0f} % {name}" for name, part in shares.items())
    return f"because {_WHY[biggest]} ({spent}): {_costs(choice, best)}"


def _costs(choice: Choice, quote: Quote) -> str:
    algorithm, n = quote.candidate.algorithm, choice.topology.world_size
    schedule = choice.schedule(quote)
    steps = show_count(schedule.num_steps, "step")
    share = algorithm.nbytes_per_rank(n, quote.chunks)
    bound = "at most " if algorithm.nbytes_per_rank.is_bound else ""
    return (
        steps if choice.collective == "barrier" else f"{steps}, the busiest rank sends {bound}{share:.3g} × the bytes"
    )


def ranges(choices: Sequence[Choice], crossovers: Sequence[Crossover]) -> str:
    """One line: `one_shot up to 880 B, then two_phase`."""
    if not crossovers:
        return f"{choices[0].best.candidate.label} at every size"
    parts = [f"{c.below} up to {show_nbytes(c.nbytes)}" for c in crossovers]
    return ", then ".join([*parts, crossovers[-1].above])
