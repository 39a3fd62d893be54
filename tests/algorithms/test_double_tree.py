"""What makes the double tree worth its name: two full trees, nobody inner twice, every port busy once per step."""

import numpy as np
import pytest

from unisono.algorithms import build
from unisono.algorithms.double_tree import parents
from unisono.algorithms.formula import ceil_log2


def test_two_trees_over_seven_ranks() -> None:
    #        3                2
    #      /   \            /   \
    #     1     5          0     4
    #    / \   / \        / \   / \
    #   0   2 4   6      6   1 3   5
    assert parents(7) == [[1, 3, 1, -1, 5, 3, 5], [2, 0, -1, 4, 2, 4, 0]]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 31, 32, 33, 100, 1023])
def test_both_are_shallow_binary_trees_and_nobody_is_inner_in_both(nodes: int) -> None:
    inner = []
    for above in parents(nodes):
        assert above.count(-1) == 1
        children = np.bincount([p for p in above if p >= 0], minlength=nodes)
        assert children.max(initial=0) <= 2
        inner.append(set(np.flatnonzero(children)))
        for node in range(nodes):
            hops = 0
            while above[node] >= 0:
                node, hops = above[node], hops + 1
            assert hops <= ceil_log2(nodes)
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "all_reduce"])
@pytest.mark.parametrize("n", [2, 3, 6, 9, 16, 37])
def test_no_rank_sends_or_receives_twice_in_a_step(collective: str, n: int) -> None:
    for step in build("double_tree", collective, n, chunks=4).explicit_steps():
        assert len(set(step.src.tolist())) == len(step)
        assert len(set(step.dst.tolist())) == len(step)


def test_large_trees_are_made_step_by_step() -> None:
    schedule = build("double_tree", "all_reduce", 24576, chunks=2)
    assert schedule.num_steps <= 4 * 15 + 4 * 2
    assert sum(len(step) for step in schedule.explicit_steps()) == 2 * 2 * 2 * 24575
