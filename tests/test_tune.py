"""The loop that measures, with a made-up clock; and the real ranks, with a real one."""

import pytest

from unisono.algorithms import names
from unisono.errors import UsageError
from unisono.schedule import COLLECTIVES
from unisono.selection import Row
from unisono.tune import DEFAULT_PATH, SharedMemory, runnable, tune


def test_measures_everything_that_can_run_and_leaves_out_what_does_not_fit() -> None:
    asked = []

    def measure(collective: str, algorithm: str, nbytes: int, ranks: int) -> float:
        asked.append((collective, algorithm, nbytes, ranks))
        if algorithm == "tree":
            raise UsageError("algorithm tree does not fit")
        return 1e-6 * (1 + nbytes)

    told: list[Row] = []
    table = tune(measure, ["all_reduce", "barrier"], 4, [64, 8, 64], on_row=told.append)
    reduces = [("all_reduce", a, s, 4) for s in (8, 64) for a in [DEFAULT_PATH, *runnable("all_reduce")]]
    barriers = [("barrier", a, 0, 4) for a in [DEFAULT_PATH, *runnable("barrier")]]
    assert asked == reduces + barriers
    assert sorted(told) == table.rows
    assert "tree" not in table.algorithms("all_reduce", 4)
    assert table.seconds("all_reduce", 4, "ring", 8) == pytest.approx(9e-6)


def test_names_restrict_the_algorithms() -> None:
    table = tune(lambda *_: 1e-6, ["all_reduce"], 2, [8], ["ring"])
    assert table.rows == [Row("all_reduce", 2, "ring", 8, 1e-6)]


def test_what_only_a_switch_can_do_is_not_run() -> None:
    assert "in_network" in names("all_reduce")
    assert "in_network" not in runnable("all_reduce")


def test_real_ranks_measure_every_collective_and_refuse_what_does_not_fit() -> None:
    with SharedMemory(2) as measure:
        for collective in COLLECTIVES:
            for name in (DEFAULT_PATH, runnable(collective)[0]):
                assert 0 < measure(collective, name, 100, 2) < 10
        with pytest.raises(UsageError, match="these are 2 ranks"):
            measure("all_reduce", "ring", 8, 3)
        with pytest.raises(UsageError, match="has no broadcast"):
            measure("broadcast", "ring", 8, 2)
        assert measure("all_reduce", "ring", 0, 2) > 0
        processes = list(measure._processes)
    assert not any(p.is_alive() for p in processes)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 rank"):
        SharedMemory(0)
