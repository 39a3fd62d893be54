import numpy as np
import pytest

from unisono.algorithms import build
from unisono.schedule.picture import contributions, life_of_chunk


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([0, 0, 0], "·"),
        ([1, 1, 1], "0-2"),
        ([1, 0, 1], "0+2"),
        ([0, 2, 0], "2×1"),
        ([1, 2, 2, 0, 1], "0+2×(1-2)+4"),
    ],
)
def test_contributions_in_short(counts: list[int], text: str) -> None:
    assert contributions(np.array(counts, dtype=np.int16)) == text


def test_a_life_in_full() -> None:
    schedule = build("ring", "all_reduce", 3)
    assert life_of_chunk(schedule, 0, range(4), (1, 0), "complete").splitlines() == [
        "chunk 0        rank 0  rank 1  rank 2",
        "before         0       1       2",
        "step 0  1>2 +  0       1       1-2",
        "step 1  2>0 +  0-2     1       1-2",
        "               ^ complete",
        "step 2  0>1 =  0-2     0-2     1-2",
        "step 3  1>2 =  0-2     0-2     0-2",
    ]


def test_a_mark_at_the_end_shows_the_end() -> None:
    schedule = build("ring", "all_reduce", 3)
    assert life_of_chunk(schedule, 0, [1], (4, 2), "here").splitlines() == [
        "chunk 0        rank 0  rank 1  rank 2",
        "before         0       1       2",
        "step 1  2>0 +  0-2     1       1-2",
        "after          0-2     0-2     0-2",
        "                               ^ here",
    ]


def test_many_transfers_are_counted_and_switches_named() -> None:
    picture = life_of_chunk(build("star", "broadcast", 8), 0, [0])
    assert "step 0  0>1 =, 0>2 =, 0>3 =, 4 more" in picture
    assert "switch 3" in life_of_chunk(build("in_network", "all_reduce", 3), 0, [0, 1])
