import subprocess
import sys

import pytest

from unisono.algorithms.pipelines import SCHEDULES, build_pipeline
from unisono.errors import UsageError
from unisono.schedule.pipeline import Action, PipelineSchedule, from_text, to_text

TEXT = """pipeline 1f1b stages=2 microbatches=3
rank 0: 0F0 0F1 0BW0 0F2 0BW1 0BW2
rank 1: 1F0 1BW0 1F1 1BW1 1F2 1BW2
"""


def test_the_text_form_is_the_one_in_the_docstring() -> None:
    assert to_text(build_pipeline("1f1b", 2, 3)) == TEXT
    assert str(from_text(TEXT)) == TEXT


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_text_form_round_trips(name: str) -> None:
    schedule = build_pipeline(name, 3, 11)
    assert from_text(to_text(schedule)) == schedule


def test_blank_lines_and_comments_are_ignored() -> None:
    assert from_text("\n# mine\n" + TEXT.replace("0F2", "0F2 ") + "\n") == from_text(TEXT)
    assert from_text("pipeline x stages=1 microbatches=1\nrank 0:  # nothing").actions == ((),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty schedule"),
        ("pipeline x stages=2", "line 1: expected 'pipeline NAME stages=S microbatches=M', got 'pipeline x stages=2'"),
        ("pipeline x stages=2 microbatches=1\n\nrank 1: 0F0", "line 3: expected 'rank 0: 0F0 ...', got 'rank 1: 0F0'"),
        ("pipeline x stages=2 microbatches=1\nrank 0: 0F0 0G1", "line 2: '0G1' is no action: expected stage, F, B"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_text(text)
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


def test_schedules_and_drawings_never_import_torch() -> None:
    modules = [f"unisono.parallel.pipeline_{part}" for part in ("schedules", "verify", "simulate", "draw")]
    code = f"import sys, {', '.join([*modules, 'unisono.cli.pipeline'])}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
