import numpy as np

from unisono.algorithms import build
from unisono.schedule import LazySteps, Step
from unisono.schedule.transform import flatten, place, refine


def test_flatten_writes_compact_steps_out() -> None:
    ring = build("ring", "all_reduce", 4)
    assert list(flatten(ring.steps)) == list(ring.explicit_steps())
    assert flatten(ring.steps)[4] == list(ring.explicit_steps())[4]
    tree = build("tree", "all_reduce", 4)
    assert flatten(tree.steps) is tree.steps
    assert flatten(()) == ()


def test_refine_cuts_chunks() -> None:
    steps = (Step.make(0, 1, [0, 2], [1, 2], True),)
    assert [repr(s) for s in refine(steps, 3)] == ["0>1 c0-2 +, 0>1 c6-11 +"]
    assert refine(steps, 1) is steps


def test_place_plays_a_schedule_in_several_groups_at_once() -> None:
    steps = (Step.make([0, 1], [1, 0], [0, 1]),)
    groups, chunks = np.array([[0, 1], [4, 6]]), np.array([[0, 1], [10, 11]])
    placed = place(steps, groups, chunks)
    assert isinstance(placed, LazySteps)
    assert [repr(s) for s in placed] == ["0>1 c0 =, 1>0 c1 =, 4>6 c10 =, 6>4 c11 ="]


def test_place_splits_what_are_no_neighbours_any_more() -> None:
    steps = (Step.make(0, 1, 1, 4, True), Step.make(1, 0, 2, 1))
    placed = place(steps, np.array([[5, 7]]), np.array([[0, 1, 2, 10, 11, 20]]))
    assert [repr(s) for s in placed] == ["5>7 c1-2 +, 5>7 c10-11 +", "7>5 c2 ="]
