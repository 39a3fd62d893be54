"""Costs of shared memory: what a call moves, and the costs found again in calls that were priced by them."""

import pytest

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.program import bind, lower
from unisono.schedule import Memory
from unisono.simulation import Effort, effort, fit_memory


def work(name: str, ranks: int, nbytes: int, cores: int) -> Effort:
    schedule = build(name, "all_reduce", ranks)
    sizes = [nbytes] * (schedule.collective.num_chunks // schedule.collective.pieces)
    tables = [bind(lower(schedule, r, "staged"), sizes, area=1 << 24) for r in range(ranks)]
    return effort(tables, nbytes, cores)


def test_bytes_are_counted_at_the_busiest_rank_or_by_turns() -> None:
    one_shot = work("one_shot", 4, 1 << 12, 4)
    assert one_shot == Effort(1, 5 * (1 << 12))  # staged once, summed of four parts into one place
    assert work("one_shot", 4, 1 << 12, 1) == Effort(1, 4 * 5 * (1 << 12))
    assert work("ring", 4, 1 << 12, 4).meetings == 6


def test_costs_are_found_again() -> None:
    memory = Memory(5e-6, 2e-6, 1e-10, 2, 4e-10)
    calls = [work(name, 4, size, 2) for name in ("one_shot", "ring") for size in (64, 1 << 14, 1 << 18, 1 << 22)]
    found = fit_memory([(call, call.seconds(memory)) for call in calls], 2)
    assert (found.call, found.meeting) == pytest.approx((5e-6, 2e-6), rel=1e-6)
    assert (found.copy, found.cold) == pytest.approx((1e-10, 4e-10), rel=1e-6)
    other = work("two_phase", 4, 1 << 16, 2)
    assert other.seconds(found) == pytest.approx(other.seconds(memory), rel=1e-6)


def test_no_cost_is_below_zero() -> None:
    faster = [(Effort(1, 1e3), 2e-6), (Effort(2, 1e6), 1e-6), (Effort(3, 1e3), 3e-6)]
    found = fit_memory(faster, 1)
    assert min(found.call, found.meeting, found.copy) >= 0
    with pytest.raises(UsageError, match="three measured calls or more, got 1"):
        fit_memory(faster[:1], 1)
