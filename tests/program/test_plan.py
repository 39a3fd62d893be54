"""Who sends what to whom, and what lands where, against the schedule it comes from."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import AlgorithmInfo, build, list_algorithms
from unisono.errors import ScheduleError, UsageError
from unisono.program import lower
from unisono.program.plan import Landing, traffic
from unisono.schedule import Collective, Schedule, Step, Transfer


def test_a_ring_is_what_the_docstring_of_ring_shows() -> None:
    steps = traffic(build("ring", "all_reduce", 3), False)
    assert [step.messages[1] for step in steps] == [{2: [c]} for c in (0, 2, 1, 0)]
    assert [step.landings(1) for step in steps] == [
        [Landing(True, 2, (0,))], [Landing(True, 1, (0,))], [Landing(False, 0, (0,))], [Landing(False, 2, (0,))]
    ]  # fmt: skip


def test_a_chunk_is_staged_once_and_travels_once_to_each_reader() -> None:
    step = Step.of(Transfer(0, 1, 4, 2), Transfer(0, 1, 1), Transfer(0, 1, 2), Transfer(0, 2, 0), Transfer(0, 2, 1))
    (moved,) = traffic(Schedule("by_hand", Collective.of("broadcast", 3, 6), (step,)), False)
    assert moved.messages == {0: {1: [1, 2, 4, 5], 2: [0, 1]}}
    assert moved.staged == {0: [0, 1, 2, 4, 5]}
    assert moved.readers(0) == {0: [2], 1: [1, 2], 2: [1], 4: [1], 5: [1]}
    assert moved.arrival_slots() == {1: {(0, c): k for k, c in enumerate((1, 2, 4, 5))}, 2: {(0, 0): 0, (0, 1): 1}}


def test_reductions_that_meet_are_one_landing_in_rank_order() -> None:
    (moved,) = traffic(build("star", "reduce", 4, root=2, chunks=3), False)
    assert moved.landings(2) == [Landing(True, chunk, (0, 1, 3)) for chunk in range(3)]
    assert [moved.landings(rank) for rank in (0, 1, 3)] == [[], [], []]


@settings(max_examples=40)
@given(
    st.sampled_from([e for e in list_algorithms() if not e.simulation_only]),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_what_one_sends_lands_at_another(entry: AlgorithmInfo, n: int, exact: bool, data: st.DataObject) -> None:
    schedule = build(
        entry.name,
        entry.collective,
        n,
        data.draw(st.integers(0, n - 1)) if entry.rooted else 0,
        data.draw(st.integers(1, 3)),
    )
    exact = exact and schedule.collective.reduces and not schedule.collective.idempotent
    for step in traffic(schedule, exact):
        sent = {(src, dst, c) for src, to in step.messages.items() for dst, chunks in to.items() for c in chunks}
        landed = [(peer, r, one.chunk) for r in range(n) for one in step.landings(r) for peer in one.peers]
        assert sorted(landed) == sorted(sent)
        assert {(src, chunk) for src, chunks in step.staged.items() for chunk in chunks} == {(s, c) for s, _, c in sent}


def test_contributions_travel_unreduced_and_are_summed_where_the_schedule_ends_the_sum() -> None:
    ring = traffic(build("ring", "all_reduce", 3), True)
    # rank 0 passes its own part of chunk 2; its own and rank 2's of chunk 1; the sum of chunk 0; that of chunk 2
    assert [step.messages[0][1] for step in ring] == [[2], [1, 2 * 3 + 1], [3 * 3 + 0], [3 * 3 + 2]]
    assert [step.sums.get(0, []) for step in ring] == [[], [0], [], []]


def test_rank_order_costs_nothing_where_contributions_come_straight() -> None:
    def carried(name: str, exact: bool) -> int:
        steps = traffic(build(name, "all_reduce", 8), exact)
        return sum(len(chunks) for step in steps for chunks in step.messages.get(3, {}).values())

    for name in ("one_shot", "two_phase", "star"):
        assert carried(name, True) == carried(name, False)
    assert carried("ring", True) == sum(range(1, 8)) + 7


def test_wrong_schedules_and_ranks_are_refused() -> None:
    ring = build("ring", "all_reduce", 3)
    with pytest.raises(UsageError, match="has no rank 3"):
        lower(ring, 3)
    with pytest.raises(UsageError, match="in_network all_reduce needs a switch"):
        lower(build("in_network", "all_reduce", 3), 0)
    collective = Collective.of("all_reduce", 2)
    for transfer in (Transfer(0, 2, 0), Transfer(0, 1, 1), Transfer(0, 0, 0)):
        with pytest.raises(ScheduleError, match="step 0 of odd"):
            lower(Schedule("odd", collective, (Step.of(transfer),)), 0)
    twice = (Step.of(Transfer(0, 1, 0, reduce=True)),) * 2
    with pytest.raises(ScheduleError, match="step 1 of odd adds contributions to chunk 0 at rank 1"):
        lower(Schedule("odd", collective, twice), 0, deterministic=True)


def test_programs_need_no_torch() -> None:
    code = "import sys; import unisono.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
