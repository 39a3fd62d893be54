from pathlib import Path

import pytest

from traces.records import call, two_ranks, write
from unisono.errors import UsageError
from unisono.trace.record import read


def test_phases_are_waiting_reducing_and_moving(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    first, second = (record.calls[0] for record in read(tmp_path))
    assert (first.wait, first.reductions, first.moves) == ((1000, 1400), [(1600, 1900)], [(1400, 1600), (1900, 2000)])
    assert (second.wait, second.reductions, second.moves) == ((1400, 1400), [(1400, 1700)], [(1700, 2000)])
    assert (first.late, second.late) == (0, 400)
    assert first.site == "train.py:5 in step"


def test_reductions_go_to_the_call_that_is_carried(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    later = [record.calls[1] for record in read(tmp_path)]
    assert [call.reductions for call in later] == [[], [(4000, 4500)]]
    assert later[0].site == "train.py:8 in step"


def test_calls_that_never_ended_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, calls=[call(1, 10, 20), call(2, 30, 0)])
    assert [call.number for call in read(tmp_path)[0].calls] == [1]


def test_no_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rank has left a record"):
        read(tmp_path)
