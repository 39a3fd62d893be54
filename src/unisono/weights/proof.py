"""The proof of a plan: its schedule brings every chunk to its targets, and the chunks are the receivers' layouts."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from unisono.verification import Finding, Report, verify
from unisono.weights.fit import covered_count

if TYPE_CHECKING:
    from unisono.weights.plan import Plan

__all__ = ["prove"]


def prove(plan: "Plan") -> Report:
    """The report of `verify` on the schedule, with findings for tensors of which a rank lacks or repeats bytes."""
    report = verify(plan.schedule)
    return replace(report, findings=(*report.findings, *_uncovered(plan)))


def _uncovered(plan: "Plan") -> Iterator[Finding]:
    """Kinds `lost` and `twice`: elements of a rank's own parts that no piece brings, or several do."""
    pieces: dict[tuple[int, str], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for chunk in plan.chunks:
        for target in chunk.targets:
            for name, offsets, shape in chunk.pieces:
                pieces.setdefault((target, name), []).append((offsets, shape))
    step, rank = plan.schedule.num_steps, plan.sender.world_size
    for receiver, fit in zip(plan.receivers, plan.fits, strict=True):
        for own in range(receiver.world_size):
            for name in fit.tensors:
                brought = pieces.pop((rank, name), [])
                wanted = [box[:2] for box in receiver[name].parts[own]]
                count, union = sum(prod(shape) for _, shape in brought), covered_count(brought)
                expected, both = sum(prod(shape) for _, shape in wanted), covered_count([*wanted, *brought])
                if both > union or both > expected:
                    words = f"{name}: {expected + union - both} of {expected} elements of rank {rank} are brought"
                    yield Finding("lost", f"{words}, and {both - expected} that it has no place for", "", step)
                if count > union:
                    yield Finding("twice", f"{name}: {count - union} elements come to rank {rank} twice", "", step)
            rank += 1
    for rank, name in pieces:
        yield Finding("lost", f"{name} comes to rank {rank}, which has no place for it", "", step)
