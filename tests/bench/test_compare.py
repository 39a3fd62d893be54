import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from unisono.bench.compare import changes, compare, drift, interval, mann_whitney
from unisono.bench.result import Machine, Rates, Result, Row
from unisono.errors import UsageError

ROW = Row("all_reduce", "unisono", 8, 2, "float32", "sum", "in", 2, 10)


def by_counting(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all ways to deal the values out that put the sides as far apart as they are."""
    values, n = [*a, *b], len(a)

    def apart(side: Sequence[float], other: Sequence[float]) -> float:
        return abs(sum(x < y for x in side for y in other) - n * len(b) / 2)

    deals = [
        apart([values[i] for i in picks], [v for i, v in enumerate(values) if i not in picks])
        for picks in itertools.combinations(range(len(values)), n)
    ]
    return sum(deal >= apart(a, b) - 1e-9 for deal in deals) / len(deals)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 5), (5, 4), (2, 7)])
def test_the_exact_test_is_what_counting_gives(sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    for shift in (0.0, 0.7, 3.0):
        a, b = generator.normal(size=sizes[0]).tolist(), (generator.normal(size=sizes[1]) + shift).tolist()
        assert mann_whitney(a, b) == pytest.approx(by_counting(a, b))


def test_ties_use_the_normal_approximation() -> None:
    assert mann_whitney([1.0] * 5, [1.0] * 5) == 1.0
    # By hand: U is 2 of 20, its variance 20 / 12 * (10 - (27 - 3) / (9 * 8)) = 16.11, z = (10 - 2 - 0.5) / 4.014
    assert mann_whitney([1, 2, 2, 3], [2, 4, 5, 6, 7]) == pytest.approx(0.0617, abs=0.0001)


def test_large_samples_agree_with_shuffling() -> None:
    generator = np.random.default_rng(1)
    values = np.concatenate((generator.normal(size=25), generator.normal(size=25) + 0.6))
    ranks_ = values.argsort().argsort()
    middle = 25 * 49 / 2
    sums = np.array([generator.permutation(ranks_)[:25].sum() for _ in range(20_000)])
    share = np.mean(abs(sums - middle) >= abs(ranks_[:25].sum() - middle))
    assert mann_whitney(values[:25].tolist(), values[25:].tolist()) == pytest.approx(share, abs=0.01)


def test_the_interval_holds_the_ratio_of_medians() -> None:
    generator = np.random.default_rng(2)
    held = 0
    for seed in range(40):
        a, b = generator.lognormal(0, 0.2, 15).tolist(), generator.lognormal(np.log(1.5), 0.2, 15).tolist()
        low, high = interval(a, b, seed)
        held += low <= 1.5 <= high
    assert held >= 34
    assert interval([1.0, 1.0], [2.0, 2.0]) == (2.0, 2.0)


def result(seconds: Sequence[Sequence[float]], copy: float = 1e9, **settings: object) -> Result:
    rows = [replace(ROW, nbytes=8 << i, seconds=tuple(s)) for i, s in enumerate(seconds)]
    return Result(dict(settings), Machine(cpu="one"), Rates((64,), (copy,), (copy,)), rows, True)


def noisy(middle: float, seed: int, width: float = 0.03) -> list[float]:
    return (middle * np.random.default_rng(seed).lognormal(0, width, 7)).tolist()


def test_real_changes_are_told_from_noise() -> None:
    before = result([noisy(1.0, seed) for seed in range(10)])
    middles = [1.0] * 7 + [1.5, 0.5, 1.02]
    after = result([noisy(middle, 100 + seed) for seed, middle in enumerate(middles)])
    verdicts = [change.verdict for change in changes(before, after)]
    assert verdicts == ["noise"] * 7 + ["slower", "faster", "noise"]
    text = compare(before, after)
    assert text[-1].startswith("# 1 faster, 1 slower, 8 noise; change in the middle ")


def test_nothing_is_real_between_runs_of_one_distribution() -> None:
    wide = [[noisy(1.0, 1000 * side + seed, 0.3) for seed in range(26)] for side in (0, 1)]
    assert [c.verdict for c in changes(result(wide[0]), result(wide[1]))].count("noise") >= 25


def test_a_change_of_the_machine_is_no_change_of_the_code() -> None:
    before, after = result([noisy(1.0, 1)]), result([noisy(1.4, 2)], copy=0.6e9)
    assert drift(before, after) == pytest.approx(1 / 0.6)
    assert [c.verdict for c in changes(before, after)] == ["noise"]
    assert [c.verdict for c in changes(before, result([noisy(1.4, 2)]))] == ["slower"]


def test_a_change_whose_interval_reaches_the_least_is_noise() -> None:
    before = result([[1.00, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]])
    uneven = result([[1.07, 1.071, 1.072, 1.30, 1.31, 1.32, 1.33]])  # beyond chance, and the medians are far apart
    (change,) = changes(before, uneven)
    assert (change.chance < 0.01, change.ratio > 1.25, change.low < 1.05) == (True, True, True)
    assert change.verdict == "noise"


def test_a_busy_machine_is_said_to_be() -> None:
    quiet, busy = result([[1.0, 1.1]]), result([[1.0, 1.1]])
    quiet.machine, busy.machine = Machine(cores=2, load=1.9), Machine(cores=2, load=2.7)
    text = "\n".join(compare(quiet, busy))
    assert "# the machine was busy before the later result (load 2.7 on 2 cores): " in text
    assert "before the earlier result" not in text


def test_unlike_results_are_said_to_be() -> None:
    a, b = result([[1.0, 1.1]], pin=True), result([[1.0, 1.2]], pin=False)
    b.complete, b.settings["root"], b.machine = False, 1, replace(b.machine, torch="2.11.0")
    text = "\n".join(compare(a, b))
    assert "# unlike: pin is True before, False after" in text
    assert "# unlike: root is None before, 1 after" in text
    assert "# unlike: torch is  before, 2.11.0 after" in text
    assert "# the later result was interrupted" in text
    assert "rows with 2 runs a side can show no difference" in text
    b.rows = []
    with pytest.raises(UsageError, match="no row in common"):
        changes(a, b)
