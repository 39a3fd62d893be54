from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.parallel.pipeline import divide_layers


@settings(max_examples=80)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_division_has_a_cheaper_costliest_stage(costs: list[int], data: st.DataObject) -> None:
    count = len(costs)
    num_stages = data.draw(st.integers(1, count))
    stages = divide_layers(costs, num_stages)
    assert [i for stage in stages for i in stage] == list(range(count))
    assert len(stages) == num_stages
    assert all(stages)
    best = min(
        max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, count)))
        for cuts in combinations(range(1, count), num_stages - 1)
    )
    assert max(sum(costs[i] for i in stage) for stage in stages) == best


def test_equal_layers_are_dealt_out_evenly_the_first_stages_getting_more() -> None:
    assert [len(stage) for stage in divide_layers(10, 4)] == [3, 3, 2, 2]
    assert divide_layers([5, 1, 1, 1, 1, 5], 3) == [range(1), range(1, 5), range(5, 6)]


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(UsageError, match=f"3 layers cannot make {num_stages} stages .* use 1 to 3 stages"):
        divide_layers(3, num_stages)


def test_costs_below_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="must not be below zero"):
        divide_layers([1, -1], 2)
