"""Every algorithm, for every collective it has, over 1 to 9 ranks, from every root: numbers, proof, formulas."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.oracle import busiest_share, numbers_are_right
from unisono.algorithms import AlgorithmInfo, build, list_algorithms
from unisono.schedule import COLLECTIVES
from unisono.verification import verify


def _name(algorithm: AlgorithmInfo) -> str:
    return f"{algorithm.name}-{algorithm.collective}"


ALL = pytest.mark.parametrize("algorithm", list_algorithms(), ids=_name)
WITH_NUMBERS = pytest.mark.parametrize(
    "algorithm", [e for e in list_algorithms() if e.collective != "barrier"], ids=_name
)


@ALL
def test_is_proved_for_every_size_and_root(algorithm: AlgorithmInfo) -> None:
    for n in range(1, 10):
        for root in range(n) if algorithm.rooted else (0,):
            schedule = build(algorithm.name, algorithm.collective, n, root, chunks=1 + root % 2)
            assert schedule.collective.name == algorithm.collective
            assert (schedule.name, schedule.collective.root) == (algorithm.name, root)
            assert all(len(step) for step in schedule.steps)
            report = verify(schedule)
            assert report.ok, str(report)


@WITH_NUMBERS
def test_moves_numbers_right(algorithm: AlgorithmInfo) -> None:
    for n in (1, 2, 3, 4, 6, 7, 9):
        for root in {0, n // 2, n - 1} if algorithm.rooted else (0,):
            assert numbers_are_right(build(algorithm.name, algorithm.collective, n, root, chunks=2)), (n, root)


@ALL
def test_formulas_tell_steps_and_bytes(algorithm: AlgorithmInfo) -> None:
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17):
        for chunks in (1, 3):
            schedule = build(algorithm.name, algorithm.collective, n, chunks=chunks)
            built = {algorithm.steps: schedule.num_steps, algorithm.nbytes_per_rank: busiest_share(schedule)}
            for formula, value in built.items():
                told = formula(n, chunks)
                assert value == pytest.approx(told) or (formula.is_bound and value < told), (n, chunks, str(formula))


@ALL
@settings(max_examples=6)
@given(data=st.data())
def test_is_proved_for_random_sizes_roots_and_chunks(algorithm: AlgorithmInfo, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12 if algorithm.collective == "all_to_all" else 24), "ranks")
    root = data.draw(st.integers(0, n - 1), "root") if algorithm.rooted else 0
    schedule = build(algorithm.name, algorithm.collective, n, root, data.draw(st.integers(1, 4), "chunks"))
    report = verify(schedule)
    assert report.ok, str(report)
    assert report.in_flight <= n - 1 + schedule.switches


def test_every_collective_has_an_algorithm_and_every_entry_a_summary() -> None:
    assert {e.collective for e in list_algorithms()} == set(COLLECTIVES)
    assert all(e.summary.endswith(".") for e in list_algorithms())
