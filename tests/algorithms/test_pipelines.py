import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms.pipelines import (
    SCHEDULES,
    bubble_formula,
    build_pipeline,
    interleaved_1f1b,
    usual_stages_per_rank,
)
from unisono.drawing import draw
from unisono.errors import UsageError
from unisono.schedule.pipeline import Action
from unisono.verification import verify

PICTURES = {
    ("gpipe", 3, 4): """
rank 0  0F0━━0F1━━0F2━━0F3━━······························0BW0━━━━━━0BW1━━━━━━0BW2━━━━━━0BW3━━━━━━
rank 1  ·····1F0━━1F1━━1F2━━1F3━━···············1BW0━━━━━━1BW1━━━━━━1BW2━━━━━━1BW3━━━━━━··········
rank 2  ··········2F0━━2F1━━2F2━━2F3━━2BW0━━━━━━2BW1━━━━━━2BW2━━━━━━2BW3━━━━━━····················
""",
    ("1f1b", 3, 4): """
rank 0  0F0━━0F1━━0F2━━····················0BW0━━━━━━0F3━━0BW1━━━━━━·····0BW2━━━━━━·····0BW3━━━━━━
rank 1  ·····1F0━━1F1━━··········1BW0━━━━━━1F2━━1BW1━━━━━━1F3━━1BW2━━━━━━·····1BW3━━━━━━··········
rank 2  ··········2F0━━2BW0━━━━━━2F1━━2BW1━━━━━━2F2━━2BW2━━━━━━2F3━━2BW3━━━━━━····················
""",
    ("interleaved", 2, 2): """
rank 0  0F0━━0F1━━2F0━━2F1━━··········2BW0━━━━━━·····2BW1━━━━━━0BW0━━━━━━0BW1━━━━━━
rank 1  ·····1F0━━1F1━━3F0━━3BW0━━━━━━3F1━━3BW1━━━━━━1BW0━━━━━━1BW1━━━━━━··········
""",
    ("zb-h1", 3, 4): """
rank 0  0F0━0F1━0F2━········0B0━0W0━0F3━0B1━0W1━0B2━0W2━0B3━0W3━
rank 1  ····1F0━1F1━····1B0━1F2━1B1━1W0━1F3━1B2━1W1━1B3━1W2━1W3━
rank 2  ········2F0━2B0━2F1━2B1━2F2━2B2━2W0━2F3━2B3━2W1━2W2━2W3━
""",
    ("zb-v", 2, 4): """
rank 0  0F0━0F1━0F2━3F0━3B0━3W0━3F1━3B1━3W1━0F3━0B0━0W0━3F2━3B2━3W2━0B1━0W1━3F3━3B3━3W3━0B2━0W2━0B3━0W3━····
rank 1  ····1F0━2F0━1F1━2F1━2B0━2W0━1F2━1B0━1W0━2F2━2B1━2W1━1F3━1B1━1W1━2F3━2B2━2W2━1B2━2B3━1B3━1W2━2W3━1W3━
""",
}


@pytest.mark.parametrize(("name", "world_size", "num_microbatches"), PICTURES)
def test_small_schedules_look_like_the_papers_figures(name: str, world_size: int, num_microbatches: int) -> None:
    drawn = str(draw(build_pipeline(name, world_size, num_microbatches), width=200))
    assert drawn.splitlines()[2 : 2 + world_size] == PICTURES[name, world_size, num_microbatches].strip().splitlines()


@settings(max_examples=150)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_every_schedule_is_right(name: str, world_size: int, num_microbatches: int, stages_per_rank: int) -> None:
    per_rank = stages_per_rank if name == "interleaved" else None
    schedule = build_pipeline(name, world_size, num_microbatches, per_rank)
    assert verify(schedule)
    assert schedule.num_stages == world_size * (per_rank or usual_stages_per_rank(name))
    done = sorted(part for row in schedule.actions for action in row for part in action.parts)
    stages, microbatches = range(schedule.num_stages), range(num_microbatches)
    assert done == sorted(Action(s, kind, m) for s in stages for kind in "FBW" for m in microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_docstrings_show_what_is_built(name: str) -> None:
    """The rows a builder's docstring quotes, for 2 ranks and 2 microbatches."""
    quoted = [part for part in inspect.getdoc(SCHEDULES[name]).split("`")[1::2] if "0F0" in part or "1F0" in part]
    rows = [" ".join(map(str, row)) for row in build_pipeline(name, 2, 2).actions]
    assert set(quoted) <= set(rows)
    assert quoted or name == "zb-v"


# p ranks, m microbatches: bubble in per cent as published for 1F1B, interleaved with v = 2, ZB-H1
PUBLISHED = {(8, 32): (17.9, 9.9, 6.8), (4, 8): (27.3, 15.8, 11.1)}


@pytest.mark.parametrize("shape", PUBLISHED)
def test_the_formulas_give_the_published_numbers(shape: tuple[int, int]) -> None:
    found = [bubble_formula(build_pipeline(name, *shape)) for name in ("1f1b", "interleaved", "zb-h1")]
    assert [round(100 * value, 1) for value in found] == list(PUBLISHED[shape])


def test_formulas_keep_to_where_they_hold() -> None:
    assert bubble_formula(build_pipeline("gpipe", 4, 8), 1, 2, 3) == bubble_formula(build_pipeline("1f1b", 4, 8))
    assert bubble_formula(interleaved_1f1b(4, 8, 4)) == pytest.approx(3 / (4 * 8 + 3))
    assert bubble_formula(interleaved_1f1b(4, 9)) is None
    assert bubble_formula(build_pipeline("zb-h1", 4, 3)) is None
    assert bubble_formula(build_pipeline("zb-h1", 4, 8), 1, 1, 2) is None
    assert bubble_formula(build_pipeline("zb-v", 4, 7)) == 0
    assert bubble_formula(build_pipeline("zb-v", 4, 6)) is None
    assert bubble_formula(build_pipeline("zb-v", 4, 7), 1, 1, 2) is None
    assert bubble_formula(build_pipeline("1f1b", 4, 7), 0, 0, 0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "unknown pipeline schedule '2f2b': expected one of gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (("gpipe", 0, 2), "at least one rank, got 0"),
        (("zb-v", 2, 0), "at least one microbatch, got 0"),
        (("interleaved", 2, 2, -1), "at least one stage per rank, got -1"),
        (("1f1b", 2, 2, 2), "1f1b has 1 stage on a rank, not 2: use interleaved"),
        (("zb-v", 2, 2, 3), "zb-v has 2 stages on a rank, not 3: use interleaved"),
    ],
)
def test_bad_shapes_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_pipeline(*arguments)
    assert message in str(caught.value)
