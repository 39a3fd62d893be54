import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms.pipelines import SCHEDULES, bubble_formula, build_pipeline, interleaved_1f1b
from unisono.errors import ScheduleError, UsageError
from unisono.schedule import Action, PipelineSchedule
from unisono.simulation import PipelineCosts, Slot, simulate

times = st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0])


@settings(max_examples=200)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 14), times, times, times)
def test_the_bubble_is_that_of_the_formula(name: str, p: int, m: int, t_f: float, t_b: float, t_w: float) -> None:
    schedule = build_pipeline(name, p, m)
    each = schedule.num_stages // p
    formula = bubble_formula(schedule, t_f, t_b, t_w)
    line = simulate(schedule, costs=PipelineCosts(t_f / each, t_b / each, t_w / each))
    assert sum(line.busy) == pytest.approx(p * m * (t_f + t_b + t_w))
    assert line.time >= max(line.spans) - 1e-9
    if formula is not None:
        assert line.bubble == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_v_has_no_bubble_when_the_three_are_equal(p: int) -> None:
    assert simulate(build_pipeline("zb-v", p, 4 * p)).bubbles == (0,) * p


def test_memory_is_that_of_the_table() -> None:
    p, m, v = 4, 12, 3
    most = {name: max(simulate(build_pipeline(name, p, m)).in_flight) for name in SCHEDULES}
    assert most == {"gpipe": m, "1f1b": p, "interleaved": p * (1 + (p - 1) / (p * 2)), "zb-h1": p, "zb-v": p}
    assert max(simulate(interleaved_1f1b(p, m, v)).in_flight) == p * (1 + (p - 1) / (p * v))
    assert simulate(build_pipeline("1f1b", p, m)).in_flight == (4, 3, 2, 1)


def test_messages() -> None:
    counts = {name: simulate(build_pipeline(name, 4, 8)).num_messages for name in SCHEDULES}
    assert counts == {"gpipe": 48, "1f1b": 48, "interleaved": 112, "zb-h1": 48, "zb-v": 96}


def test_times_of_each_stage_and_of_the_link() -> None:
    schedule = PipelineSchedule.from_text("pipeline x stages=2 microbatches=1\nrank 0: 0F0 0B0 0W0\nrank 1: 1F0 1BW0")
    costs = PipelineCosts(forward=[1, 2], input_gradient=[3, 4], weight_gradient=[5, 6], link=0.5)
    line = simulate(schedule, costs=costs)
    assert line.slots[0] == (
        Slot(Action(0, "F", 0), 0, 1),
        Slot(Action(0, "B", 0), 14, 17),  # both gradients of stage 1, then the link
        Slot(Action(0, "W", 0), 17, 22),
    )
    assert line.slots[1] == (Slot(Action(1, "F", 0), 1.5, 3.5), Slot(Action(1, "BW", 0), 3.5, 13.5))
    assert (line.time, line.busy, line.spans) == (22, (9, 12), (22, 12))
    assert line.bubbles == pytest.approx((13 / 22, 0))
    assert line.bubble == line.bubbles[0]


def test_stages_of_one_rank_need_no_link() -> None:
    schedule = PipelineSchedule.from_text("pipeline x stages=2 microbatches=1\nrank 0: 0F0 1F0 1BW0 0BW0")
    assert simulate(schedule, costs=PipelineCosts(link=9)).time == 6


def test_nothing_takes_no_time() -> None:
    line = simulate(build_pipeline("1f1b", 2, 2), costs=PipelineCosts(0, 0, 0))
    assert (line.time, line.bubble, line.bubbles) == (0, 0, (0, 0))


def test_wrong_schedules_and_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match="no rank does 0F0"):
        simulate(PipelineSchedule("empty", 1, 1, ((),)))
    schedule = build_pipeline("1f1b", 2, 2)
    with pytest.raises(UsageError, match="forward has 3 times: expected one for all stages or 2"):
        simulate(schedule, costs=PipelineCosts(forward=[1, 2, 3]))
    with pytest.raises(UsageError, match="link must not be below zero, got -1"):
        simulate(schedule, costs=PipelineCosts(link=-1))
    with pytest.raises(UsageError, match="weight_gradient must not be below zero, got nan"):
        simulate(schedule, costs=PipelineCosts(weight_gradient=float("nan")))
