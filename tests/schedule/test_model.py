from dataclasses import replace

import numpy as np
import pytest

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.schedule import Collective, LazySteps, Schedule, Step, Transfer
from unisono.schedule.model import chain_steps


def test_a_step_is_arrays_and_transfers() -> None:
    step = Step.make([0, 1], [1, 0], 4, count=[1, 2], reduce=True)
    assert (step.src.dtype, step.reduce.dtype) == (np.dtype(np.int32), np.dtype(np.bool_))
    assert list(step) == [Transfer(0, 1, 4, 1, True), Transfer(1, 0, 4, 2, True)]
    assert step == Step.of(*step)
    assert hash(step) == hash(Step.of(*step))
    assert repr(step) == "0>1 c4 +, 1>0 c4-5 +"
    assert repr(Step.make(0, np.arange(1, 30), 0)) == "<step of 29 transfers>"
    assert step != Step.make([0, 1], [1, 0], 4, count=[1, 2], reduce=False)
    assert len(Step.of()) == 0


def test_a_compact_step_is_its_explicit_steps() -> None:
    ranks = np.arange(5)
    compact = Step.make(ranks, (ranks + 1) % 5, ranks * 2, 2, True, repeat=4, shift=-2, modulo=10)
    written_out = [Step.make(ranks, (ranks + 1) % 5, (ranks - i) % 5 * 2, 2, True) for i in range(4)]
    assert list(compact.explicit()) == written_out
    assert compact.at(3) == written_out[3]
    assert list(compact.reversed(reduce=False).explicit()) == [s.reversed(False) for s in reversed(written_out)]
    assert repr(compact) == "<4 steps of 5 transfers each>"
    with pytest.raises(UsageError, match="iterate over explicit"):
        list(compact)
    schedule = Schedule("ring", Collective.of("reduce_scatter", 5, 2), (compact,))
    assert schedule == replace(schedule, steps=tuple(written_out), name="other")
    assert hash(schedule) == hash(replace(schedule, steps=tuple(written_out)))
    assert schedule.num_steps == 4


def test_each_transfer_may_shift_its_own_way() -> None:
    both = Step.together(
        Step.make(0, 1, 0, repeat=3, shift=1, modulo=6), Step.make(1, 0, 5, reduce=True, repeat=3, shift=-1, modulo=6)
    )
    assert [repr(s) for s in both.explicit()] == ["0>1 c0 =, 1>0 c5 +", "0>1 c1 =, 1>0 c4 +", "0>1 c2 =, 1>0 c3 +"]
    with pytest.raises(UsageError, match="only be joined if they repeat alike"):
        Step.together(both, Step.make(0, 1, 0))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"src": [0, 1], "dst": [1, 2, 3], "chunk": 0}, "must have one length"),
        ({"src": [[0]], "dst": 1, "chunk": 0}, "have one dimension, got 2"),
        ({"src": 0, "dst": 1, "chunk": 0, "repeat": 2}, "needs repeat >= 1 and a modulo, got repeat=2, modulo=0"),
        ({"src": 0, "dst": 1, "chunk": 0, "repeat": 0}, "repeat=0"),
    ],
)
def test_bad_arrays_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Step.make(**arguments)  # type: ignore[arg-type]


def test_lazy_steps_are_made_when_looked_at() -> None:
    made: list[int] = []

    def make(i: int) -> Step:
        made.append(i)
        return Step.make(i, i + 1, 0)

    steps = LazySteps(1000, make)
    assert len(chain_steps(steps, (Step.of(),))) == 1001
    assert made == []
    assert steps[-1] == Step.make(999, 1000, 0)
    assert steps[2:6:2] == (Step.make(2, 3, 0), Step.make(4, 5, 0))
    assert made == [999, 2, 4]
    assert len(LazySteps(-1, make)) == 0
    with pytest.raises(IndexError, match="step 1000 of 1000"):
        steps[1000]


def test_lazy_and_held_schedules_are_equal() -> None:
    lazy = build("chain", "broadcast", 4, chunks=3)
    assert isinstance(lazy.steps, LazySteps)
    assert lazy == replace(lazy, steps=list(lazy.explicit_steps()))
    assert lazy != build("chain", "broadcast", 4, chunks=2)
    assert lazy != build("chain", "broadcast", 4, root=1, chunks=3)
    assert lazy != "a schedule"
    assert repr(lazy) == "<chain broadcast: 4 ranks, 5 steps>"


def test_backwards_twice_is_forwards() -> None:
    for name, collective in (("tree", "broadcast"), ("double_tree", "broadcast"), ("bruck", "all_gather")):
        there = build(name, collective, 7, chunks=2)
        back = there.reversed()
        assert [len(s) for s in back.steps] == [len(s) for s in reversed(list(there.steps))]
        again = [s.reversed(False) for s in reversed(list(back.explicit_steps()))]
        assert again == list(there.explicit_steps())
    with pytest.raises(UsageError, match="all_reduce cannot run backwards: expected one of broadcast"):
        build("ring", "all_reduce", 3).reversed()
    assert build("ring", "all_gather", 3).reversed(name="gnir").name == "gnir"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (("ring", "all_gather", 4), ("ring", "reduce_scatter", 4), "all_gather followed by reduce_scatter is no"),
        (("ring", "reduce_scatter", 4), ("ring", "all_gather", 5), "must have the same ranks and chunks"),
        (("tree", "reduce", 4, 1), ("tree", "broadcast", 4, 2), "reduce ends at root 1 but broadcast starts at root 2"),
    ],
)
def test_what_cannot_follow_each_other_says_why(
    first: tuple[object, ...], second: tuple[object, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build(*first).then(build(*second))  # type: ignore[arg-type]


def test_roots_pass_through_compositions() -> None:
    scattered = build("tree", "scatter", 4, root=2).then(build("ring", "all_gather", 4))
    assert (scattered.collective.name, scattered.collective.root) == ("broadcast", 2)
    through = build("tree", "reduce", 4, root=3).then(build("star", "broadcast", 4, root=3))
    assert (through.name, through.collective.name, through.collective.root) == ("tree+star", "all_reduce", 0)


def test_names_and_barriers() -> None:
    with pytest.raises(UsageError, match="a schedule's name is one word, got 'two words'"):
        Schedule("two words", Collective.of("all_reduce", 2), ())
    with pytest.raises(UsageError, match="only an all_reduce serves as a barrier, not broadcast"):
        build("tree", "broadcast", 2).as_barrier()
