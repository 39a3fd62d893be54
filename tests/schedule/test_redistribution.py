"""A collective whose pre- and postcondition are tables: proved, simulated by each chunk's bytes, written and read."""

import json

import pytest
import torch

from unisono import Schedule, Step, Transfer, UsageError, draw, run, simulate, verify
from unisono.program import lower
from unisono.schedule import Redistribution, preset
from unisono.schedule.text import read_schedule

STEPS = (
    Step.of(Transfer(0, 2, 0), Transfer(0, 3, 0)),
    Step.of(Transfer(0, 2, 1), Transfer(1, 3, 2)),
)
TABLE = Redistribution(4, [0, 0, 1], [(2, 3), (2,), (3,)], [100, 50, 7])
MOVED = Schedule("weights", TABLE, STEPS)

TEXT = """\
schedule weights redistribution ranks=4 chunks=3
chunk 0: 0>2,3 100
chunk 1: 0>2 50
chunk 2: 1>3 7
step 0: 0>2 c0 =, 0>3 c0 =
step 1: 0>2 c1 =, 1>3 c2 =
"""


def test_the_tables_are_the_conditions() -> None:
    assert TABLE.held_before().tolist() == [[True, True, False], [False, False, True], [False] * 3, [False] * 3]
    assert TABLE.held_after().tolist() == [[False] * 3, [False] * 3, [True, True, False], [True, False, True]]
    assert (TABLE.name, TABLE.num_chunks, TABLE.own_nbytes, TABLE.reduces, TABLE.rooted) == (
        "redistribution",
        3,
        157,
        False,
        False,
    )
    assert [TABLE.owner(c) for c in range(3)] == [None, 2, 3]
    assert [TABLE.source(c) for c in range(3)] == [0, 0, 1]


def test_tables_are_equal_by_value() -> None:
    assert Redistribution(4, (0, 0, 1), [[2, 3], [2], [3]], [100, 50, 7]) == TABLE
    assert Redistribution(4, [0, 0, 1], [(2, 3), (2,), (3,)], [100, 50, 8]) != TABLE


def test_it_is_proved() -> None:
    assert verify(MOVED)
    lost = verify(Schedule("weights", TABLE, STEPS[:1]))
    assert "chunk 1: the contribution of rank 0 is missing at rank 2 at the end" in str(lost)
    astray = (*STEPS, Step.of(Transfer(0, 1, 0)))
    assert [note.kind for note in verify(Schedule("weights", TABLE, astray)).notes] == ["unused"]


def test_each_chunk_takes_the_time_of_its_bytes() -> None:
    where = preset("ethernet", 4)
    link = where.inter
    assert link is not None
    first, second = 2 * 100 * link.beta + link.alpha, 50 * link.beta + link.alpha
    line = simulate(MOVED, where)
    assert line.time == pytest.approx(first + second)
    assert line.nbytes == 157
    assert line.busbw == line.algbw
    assert line.traffic.sent(4).tolist() == [250, 7, 0, 0]
    assert simulate(MOVED, where, 314).traffic.sent(4).tolist() == [500, 14, 0, 0]
    assert simulate(MOVED, where, chunks=2).traffic.sent(4).tolist() == [250, 7, 0, 0]


def test_text_and_json() -> None:
    assert str(MOVED) == TEXT
    assert read_schedule(TEXT) == MOVED
    assert read_schedule(json.dumps(MOVED.to_json())) == MOVED


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("chunk 1: 0>2 50\n", "", "line 3: expected 'chunk 1: SOURCE>TARGETS NBYTES', got 'chunk 2: 1>3 7'"),
        ("0>2 50", "0>2", "line 3: expected 'chunk 1: SOURCE>TARGETS NBYTES'"),
        ("chunks=3", "chunks=4", "a redistribution, and nothing else, lists its chunks: redistribution of 4 lists 3"),
        ("redistribution", "all_reduce", "all_reduce of 3 lists 3"),
        ("1>3 7", "1>1 7", "chunk 2 of a redistribution over 4 ranks: from 1 to [1], 7 bytes; expected other ranks"),
        ("1>3 7", "1>9 7", "from 1 to [9]"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_schedule(TEXT.replace(old, new, 1))
    assert words in str(caught.value)


@pytest.mark.parametrize("table", [[0, 0], [[0, 1, 2]], "x", [[0, 1, 2, 3]] * 3])
def test_json_that_does_not_fit_is_refused(table: object) -> None:
    with pytest.raises(UsageError):
        read_schedule(json.dumps(MOVED.to_json() | {"table": table}))


def test_tables_of_other_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match="tables of one length, got 1 sources, 0 targets, 1 nbytes"):
        Redistribution(2, [0], [], [4])
    with pytest.raises(UsageError, match="at least 1 rank"):
        Redistribution(0, [], [], [])


def test_nothing_to_move() -> None:
    empty = Schedule("weights", Redistribution(2, [], [], []), ())
    assert verify(empty)
    assert simulate(empty).time == 0
    assert read_schedule(str(empty)) == empty


def test_it_is_drawn() -> None:
    assert "→2-3 c0 =" in str(draw(MOVED))
    for form in ("svg", "html", "gantt", "trace"):
        assert "100 B" in str(draw(MOVED, form)) or form in ("svg", "html")


def test_run_says_who_runs_it() -> None:
    with pytest.raises(UsageError, match=r"weights is a redistribution, .*: unisono\.weights runs it"):
        run(MOVED, [torch.zeros(3)] * 4)
    with pytest.raises(UsageError, match=r"weights is a redistribution, .*: unisono\.weights runs it"):
        lower(MOVED, 0)
