import json

import pytest

from unisono.algorithms.pipelines import SCHEDULES, build_pipeline
from unisono.errors import UsageError
from unisono.schedule import Action, PipelineSchedule
from unisono.schedule.text import read_schedule

TEXT = """pipeline 1f1b stages=2 microbatches=3
rank 0: 0F0 0F1 0BW0 0F2 0BW1 0BW2
rank 1: 1F0 1BW0 1F1 1BW1 1F2 1BW2
"""


def test_the_text_form_is_the_one_in_the_docstring() -> None:
    assert build_pipeline("1f1b", 2, 3).to_text() == TEXT
    assert str(PipelineSchedule.from_text(TEXT)) == TEXT


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_and_json_round_trip(name: str) -> None:
    schedule = build_pipeline(name, 3, 11)
    assert read_schedule(schedule.to_text()) == schedule
    assert read_schedule(json.dumps(schedule.to_json())) == schedule


def test_blank_lines_and_comments_are_ignored() -> None:
    assert PipelineSchedule.from_text("\n# mine\n" + TEXT.replace("0F2", "0F2 ") + "\n") == PipelineSchedule.from_text(
        TEXT
    )
    assert PipelineSchedule.from_text("pipeline x stages=1 microbatches=1\nrank 0:  # nothing").actions == ((),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty schedule"),
        ('{"pipeline": "x"}', "expected the fields pipeline, stages, microbatches, actions"),
        ('{"pipeline": "x", "stages": 1, "microbatches": 1, "actions": [["0"]]}', "'0' is no action"),
        ("pipeline x stages=2", "line 1: expected 'pipeline NAME stages=S microbatches=M', got 'pipeline x stages=2'"),
        ("pipeline x stages=2 microbatches=1\n\nrank 1: 0F0", "line 3: expected 'rank 0: 0F0 ...', got 'rank 1: 0F0'"),
        ("pipeline x stages=2 microbatches=1\nrank 0: 0F0 0G1", "line 2: '0G1' is no action: expected stage, F, B"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_schedule(text)
    assert message in str(caught.value)


def test_what_an_action_needs() -> None:
    assert Action(0, "F", 4).needs(3) == ()
    assert Action(2, "F", 4).needs(3) == (Action(1, "F", 4),)
    assert Action(1, "B", 4).needs(3) == (Action(1, "F", 4), Action(2, "B", 4))
    assert Action(2, "B", 4).needs(3) == (Action(2, "F", 4),)
    assert Action(2, "W", 4).needs(3) == (Action(2, "B", 4),)


def test_where_stages_are() -> None:
    schedule = build_pipeline("zb-v", 3, 2)
    assert schedule.ranks == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}
    assert [schedule.stages_of(rank) for rank in range(schedule.world_size)] == [(0, 5), (1, 4), (2, 3)]
    assert PipelineSchedule("none", 1, 1, ()).ranks == {}
