import numpy as np

from unisono.algorithms import build
from unisono.schedule import Collective, Schedule, Step, Transfer
from unisono.schedule.state import State, Units, lineage, states


def test_contributions_of_a_ring_of_three() -> None:
    seen = [
        [[r for r in range(3) if s.at(rank, 0)[r]] for rank in range(3)] for s in states(build("ring", "all_reduce", 3))
    ]
    assert seen == [
        [[0], [1], [2]],
        [[0], [1], [1, 2]],
        [[0, 1, 2], [1], [1, 2]],
        [[0, 1, 2], [0, 1, 2], [1, 2]],
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]],
    ]


def test_reads_come_first_then_copies_then_reductions() -> None:
    swap = Step.of(Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True), Transfer(2, 0, 0, 1, True))
    schedule = Schedule("swap", Collective.of("all_reduce", 3), (swap,))
    *_, last = states(schedule)
    assert last.counts[:, 0].tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 1]]


def test_following_some_chunks_gives_what_following_all_gives() -> None:
    schedule = build("hierarchical", "all_gather", 6, chunks=2)
    for everything, some in zip(states(schedule), states(schedule, [3, 8]), strict=True):
        assert (everything.counts[:, [3, 8]] == some.counts).all()
        assert (everything.at(5, 8) == some.at(5, 8)).all()


def test_counts_do_not_overflow() -> None:
    swap = Step.of(Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True))
    *_, last = states(Schedule("wild", Collective.of("all_reduce", 2), (swap,) * 100))
    assert last.counts.tolist() == [[[99, 99]], [[99, 99]]]


def test_switches_hold_nothing_at_first() -> None:
    state = State(Collective.of("all_reduce", 2), switches=1)
    assert state.counts[:, 0].tolist() == [[1, 0], [0, 1], [0, 0]]


def test_units_leave_out_what_is_not_well_formed() -> None:
    schedule = Schedule("odd", Collective.of("all_reduce", 2, 4), ())
    step = Step.of(
        Transfer(0, 1, 3, 2), Transfer(0, 0, 0), Transfer(0, 1, 1, 3, True), Transfer(0, 2, 0), Transfer(1, 0, 0, 0)
    )
    units = Units.of(schedule, step)
    assert units.chunk.tolist() == [1, 2, 3]
    assert units.transfer.tolist() == [2, 2, 2]
    assert units.reduce.all()
    huge = Step.of(Transfer(0, 1, 2147483647, 2147483647), Transfer(0, 1, 0, 2147483647))
    assert len(Units.of(schedule, huge).src) == 0


def test_lineage_is_the_shortest_list_of_steps() -> None:
    steps = list(build("tree", "broadcast", 8).explicit_steps())
    assert lineage(steps, 3, 0) == {1: [Transfer(0, 2, 0)], 2: [Transfer(2, 3, 0)]}
    assert lineage(steps, 0, 0) == {}
    assert lineage(steps[:2], 3, 0) == {}
    overwritten = [Step.of(Transfer(1, 0, 0, 1, True)), Step.of(Transfer(2, 0, 0))]
    assert lineage(overwritten, 0, 0) == {1: [Transfer(2, 0, 0)]}


def test_lineage_alone_gives_the_same_value() -> None:
    schedule = build("halving_doubling", "all_reduce", 6, chunks=2)
    steps = list(schedule.explicit_steps())
    *_, last = states(schedule)
    for rank in range(6):
        alone = State(schedule.collective, chunks=[5])
        for moved in lineage(steps, rank, 5).values():
            alone.apply(Units.of(schedule, Step.of(*moved)))
        assert np.array_equal(alone.at(rank, 5), last.at(rank, 5))
