"""One rank's share, against the schedule it comes from."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import AlgorithmInfo, build, list_algorithms
from unisono.errors import ScheduleError, UsageError
from unisono.program.plan import Landing, Message, Part, Span, plan
from unisono.schedule import Collective, Schedule, Step, Transfer


def chunks_of(spans: tuple[Span, ...]) -> list[int]:
    return [c for span in spans for c in range(span.chunk, span.chunk + span.count)]


def test_a_ring_is_what_the_docstring_of_ring_shows() -> None:
    mine = plan(build("ring", "all_reduce", 3), 1)
    assert [step.sends for step in mine.steps] == [(Message(2, (Span(c, 1),)),) for c in (0, 2, 1, 0)]
    assert [step.receives for step in mine.steps] == [(Message(0, (Span(c, 1),)),) for c in (2, 1, 0, 2)]
    assert [step.landings[0].reduce for step in mine.steps] == [True, True, False, False]


def test_neighbouring_chunks_travel_and_land_as_one() -> None:
    step = Step.of(Transfer(0, 1, 4, 2), Transfer(0, 1, 1), Transfer(0, 1, 2), Transfer(0, 2, 0))
    share = plan(Schedule("by_hand", Collective.of("broadcast", 3, 6), (step,)), 1).steps[0]
    assert share.receives == (Message(0, (Span(1, 2), Span(4, 2))),)
    slots_at_0 = [0, 1, 2, 4, 5]
    assert share.landings == (
        Landing(Span(1, 2), (Part(0, 0, slots_at_0.index(1)),), False),
        Landing(Span(4, 2), (Part(0, 2, slots_at_0.index(4)),), False),
    )


def test_reductions_that_meet_are_one_landing_in_rank_order() -> None:
    share = plan(build("star", "reduce", 4, root=2, chunks=3), 2).steps[0]
    assert [message.peer for message in share.receives] == [1, 0, 3]
    assert share.landings == (Landing(Span(0, 3), (Part(0, 0, 0), Part(1, 0, 0), Part(3, 0, 0)), True),)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([e for e in list_algorithms() if not e.simulation_only]),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_what_one_sends_another_receives(entry: AlgorithmInfo, n: int, exact: bool, data: st.DataObject) -> None:
    schedule = build(
        entry.name,
        entry.collective,
        n,
        data.draw(st.integers(0, n - 1)) if entry.rooted else 0,
        data.draw(st.integers(1, 3)),
    )
    shares = [plan(schedule, rank, exact) for rank in range(n)]
    assert len({len(share.steps) for share in shares}) == 1
    for step in zip(*(share.steps for share in shares), strict=True):
        sent = {(r, m.peer, m.spans) for r, share in enumerate(step) for m in share.sends}
        came = {(m.peer, r, m.spans) for r, share in enumerate(step) for m in share.receives}
        assert sent == came
        for share in step:
            for one in share.landings:
                for part in one.parts:
                    for i in range(one.span.count):
                        message = next(m for m in share.receives if m.peer == part.peer)
                        assert chunks_of(message.spans)[part.place + i] == one.span.chunk + i
                        assert chunks_of(step[part.peer].staged)[part.slot + i] == one.span.chunk + i


def test_contributions_travel_unreduced_and_are_summed_where_the_schedule_ends_the_sum() -> None:
    ring = plan(build("ring", "all_reduce", 3), 0, deterministic=True)
    carried = [chunks_of(m.spans) for step in ring.steps for m in step.sends]
    # rank 0 passes its own part of chunk 2; its own and rank 2's of chunk 1; the sum of chunk 0; that of chunk 2
    assert carried == [[2], [1, 2 * 3 + 1], [3 * 3 + 0], [3 * 3 + 2]]
    assert [step.sums for step in ring.steps] == [(), (Span(0, 1),), (), ()]


def test_rank_order_costs_nothing_where_contributions_come_straight() -> None:
    def carried(name: str, exact: bool) -> int:
        steps = plan(build(name, "all_reduce", 8), 3, exact).steps
        return sum(len(chunks_of(m.spans)) for step in steps for m in step.sends)

    for name in ("one_shot", "two_phase", "star"):
        assert carried(name, True) == carried(name, False)
    assert carried("ring", True) == sum(range(1, 8)) + 7


def test_wrong_schedules_and_ranks_are_refused() -> None:
    ring = build("ring", "all_reduce", 3)
    with pytest.raises(UsageError, match="has no rank 3"):
        plan(ring, 3)
    with pytest.raises(UsageError, match="in_network all_reduce needs a switch"):
        plan(build("in_network", "all_reduce", 3), 0)
    collective = Collective.of("all_reduce", 2)
    for transfer in (Transfer(0, 2, 0), Transfer(0, 1, 1), Transfer(0, 0, 0)):
        with pytest.raises(ScheduleError, match="step 0 of odd"):
            plan(Schedule("odd", collective, (Step.of(transfer),)), 0)
    twice = (Step.of(Transfer(0, 1, 0, reduce=True)),) * 2
    with pytest.raises(ScheduleError, match="step 1 of odd adds contributions to chunk 0 at rank 1"):
        plan(Schedule("odd", collective, twice), 0, deterministic=True)


def test_plans_need_no_torch() -> None:
    code = "import sys; import unisono.program.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
