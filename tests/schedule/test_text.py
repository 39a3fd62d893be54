import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build, list_algorithms
from unisono.errors import UsageError
from unisono.schedule import COLLECTIVES, Collective, Schedule, Step, Transfer
from unisono.schedule.collectives import ROOTED


def test_the_text_is_short() -> None:
    schedule = build("tree", "gather", 3, root=1)
    assert str(schedule) == "schedule tree gather ranks=3 chunks=3 root=1\nstep 0: 2>1 c2 =\nstep 1: 0>1 c0 =\n"
    assert Schedule.from_text(str(schedule)) == schedule


def test_comments_and_spaces_do_not_matter() -> None:
    text = """
    # mine
    schedule mine broadcast  chunks=4 ranks=3 root=1
    step 0:  1 > 0 c0-3 = ,1>2 c0 =   # the first two

    step 1:
    step 2: 1>2 c1-3 +
    """
    schedule = Schedule.from_text(text)
    assert schedule.name == "mine"
    assert schedule.collective == Collective("broadcast", 3, 4, 1)
    assert schedule.steps == (
        Step.of(Transfer(1, 0, 0, 4), Transfer(1, 2, 0)),
        Step.of(),
        Step.of(Transfer(1, 2, 1, 3, True)),
    )


@pytest.mark.parametrize("algorithm", list_algorithms(), ids=lambda e: f"{e.name}-{e.collective}")
def test_every_algorithm_round_trips(algorithm) -> None:  # type: ignore[no-untyped-def]
    schedule = build(algorithm.name, algorithm.collective, 5, chunks=2)
    again = Schedule.from_text(schedule.to_text())
    assert again == schedule
    assert (again.name, again.switches, again.to_text()) == (schedule.name, schedule.switches, schedule.to_text())
    from_json = Schedule.from_json(json.loads(json.dumps(schedule.to_json())))
    assert from_json == schedule
    assert from_json.name == schedule.name


numbers = st.integers(-3, 40)
transfers = st.builds(Transfer, numbers, numbers, st.integers(0, 40), st.integers(1, 9), st.booleans())


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(COLLECTIVES))
    n = draw(st.integers(1, 5))
    root = draw(st.integers(0, n - 1)) if name in ROOTED else 0
    collective = Collective.of(name, n, draw(st.integers(1, 3)), root)
    steps = draw(st.lists(st.lists(transfers, max_size=4).map(lambda ts: Step.of(*ts)), max_size=4))
    return Schedule("drawn", collective, tuple(steps), draw(st.integers(0, 2)))


@settings(max_examples=150)
@given(schedules())
def test_any_schedule_round_trips_even_a_wrong_one(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty schedule: expected 'schedule NAME"),
        ("# only a comment", "empty schedule"),
        ("schedule a all_reduce ranks=2", "line 1: expected 'schedule NAME COLLECTIVE ranks=N chunks=C"),
        ("schedule a all_reduce ranks=2 chunks=two", "line 1: expected"),
        ("schedule a all_reduce ranks=2 ranks=3 chunks=2", "line 1: expected"),
        ("schedule a all_reduce ranks=2 chunks=2 speed=3", "line 1: expected"),
        ("plan a all_reduce ranks=2 chunks=2", "line 1: expected"),
        ("schedule a all_redcue ranks=2 chunks=2", "unknown collective 'all_redcue'"),
        ("schedule a all_reduce ranks=2 chunks=2\nstep 1: 0>1 c0 +", "line 2: expected 'step 0: ...', got 'step 1"),
        ("schedule a all_reduce ranks=2 chunks=2\n\n0>1 c0 +", "line 3: expected 'step 0: ...'"),
        ("schedule a all_reduce ranks=2 chunks=2\nstep 0: 0>1 c0", "line 2: expected a transfer such as"),
        ("schedule a all_reduce ranks=2 chunks=2\nstep 0: 0>1 c0 +,", "line 2: expected a transfer such as .* got ''"),
        ("schedule a all_reduce ranks=2 chunks=2\nstep 0: 0>99999999999 c0 +", "must fit 32 bits"),
        ("schedule a all_reduce ranks=2 chunks=2\nstep 0: 0>1 0 +", "got '0>1 0 \\+'"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Schedule.from_text(text)


@pytest.mark.parametrize("field", ["schedule", "collective", "ranks", "chunks", "steps"])
def test_json_without_a_field_is_refused(field: str) -> None:
    data = build("ring", "all_reduce", 2).to_json()
    del data[field]
    with pytest.raises(UsageError, match=f"not a schedule in JSON .*{field}"):
        Schedule.from_json(data)


@pytest.mark.parametrize(
    "other", [{"steps": [[0]]}, {"steps": [[["0", 1, 0, 1, True]]]}, {"ranks": 2.5}, {"root": None}]
)
def test_json_of_another_shape_is_refused(other: dict[str, object]) -> None:
    data = build("ring", "all_reduce", 2).to_json()
    with pytest.raises(UsageError, match="not a schedule in JSON"):
        Schedule.from_json(data | other)
    with pytest.raises(UsageError, match="not a schedule in JSON"):
        Schedule.from_json([data])  # type: ignore[arg-type]
