from pathlib import Path

import pytest

from traces.records import MAIN, call, read_one, two_ranks, write
from unisono.errors import UsageError
from unisono.trace.record import read


def test_phases_are_waiting_reducing_and_moving(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    first, second = (record.calls[0] for record in read_one(tmp_path))
    assert (first.wait, first.reductions, first.moves) == ((1000, 1400), [(1600, 1900)], [(1400, 1600), (1900, 2000)])
    assert (second.wait, second.reductions, second.moves) == ((1400, 1400), [(1400, 1700)], [(1700, 2000)])
    assert (first.late, second.late) == (0, 400)
    assert first.site == "train.py:5 in step"


def test_times_of_another_host_are_put_on_the_first_ones_clock(tmp_path: Path) -> None:
    write(tmp_path, 0, calls=[call(1, 1000, 2000)])
    there = {"calls": [call(1, 51_400, 52_000)], "spans": [["allreduce", 51_390, 52_010, MAIN, "train.py:5 in step"]]}
    write(tmp_path, 1, **there, reductions=[[51_600, 51_700]], marks=[[51_000, 9]], since=50_500, offset=-50_000)
    first, second = read_one(tmp_path)
    assert second.calls[0].late == 400
    assert (second.calls[0].wait, second.calls[0].reductions) == ((1400, 1400), [(1600, 1700)])
    assert (second.spans[0].begin, second.marks, second.since) == (1390, [(1000, 9)], 500)
    assert second.clock == first.clock + 50_000


def test_reductions_go_to_the_call_that_is_carried(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    later = [record.calls[1] for record in read_one(tmp_path)]
    assert [call.reductions for call in later] == [[], [(4000, 4500)]]
    assert later[0].site == "train.py:8 in step"


def test_calls_that_never_ended_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, calls=[call(1, 10, 20), call(2, 30, 0)])
    assert [call.number for call in read_one(tmp_path)[0].calls] == [1]


def test_default_groups_one_after_another_are_told_apart(tmp_path: Path) -> None:
    groups = {"abc": [0, 1], "def": [0, 1]}
    for rank in (0, 1):
        calls = [call(1, 1000 + rank, 2000), call(1, 5000 + rank, 6000, memory="def")]
        write(tmp_path, rank, calls=calls, groups=groups)
    one = read_one(tmp_path)[1]
    assert [(call.begin, call.ready, call.late) for call in one.calls] == [(1001, 1001, 1), (5001, 5001, 1)]


def test_launches_are_told_apart(tmp_path: Path) -> None:
    for pid, memory, begin in ((300, "later", 9000), (100, "abc", 1000)):
        for rank in (0, 1):
            groups = {memory: [0, 1]}
            calls = [call(1, begin + rank, begin + 500, memory=memory)]
            write(tmp_path, rank, pid=pid + rank, calls=calls, groups=groups)
    first, second = read(tmp_path)
    assert [(record.rank, record.pid) for record in first + second] == [(0, 100), (1, 101), (0, 300), (1, 301)]
    assert [record.calls[0].late for record in first + second] == [0, 1, 0, 1]


def test_groups_without_a_call_hold_a_launch_together(tmp_path: Path) -> None:
    for rank in range(4):
        half = {"memory": f"half {rank // 2}", "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
        groups = {"abc": [0, 1, 2, 3], half["memory"]: half["ranks"]}
        write(tmp_path, rank, calls=[call(1, 1000, 2000, **half)], groups=groups)
    assert [record.rank for record in read_one(tmp_path)] == [0, 1, 2, 3]


def test_only_what_all_ranks_have_kept_counts(tmp_path: Path) -> None:
    calls = [call(k, 1000 * k, 1000 * k + 500) for k in range(1, 6)]
    spans = [["allreduce", 1000 * k, 1000 * k + 500, MAIN, "train.py:5 in step"] for k in range(1, 6)]
    write(tmp_path, 0, calls=calls, spans=spans)
    write(tmp_path, 1, calls=[call(2, 1990, 2500), *calls[2:]], spans=spans[3:], since=2000)
    for record in read_one(tmp_path):
        assert [call.number for call in record.calls] == [3, 4, 5]
        assert min(span.begin for span in record.spans) >= 2000


def test_no_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rank has left a record"):
        read(tmp_path)
