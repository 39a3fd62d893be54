from pathlib import Path

import pytest

from traces.records import MAIN, call, read_one, two_ranks, write
from unisono.trace.page import report_page
from unisono.trace.summary import Summary, summarize


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    two_ranks(tmp_path)
    return summarize(read_one(tmp_path), lambda op, nbytes, ranks: nbytes * 1e-10 if op == "all_reduce" else 0.0)


def test_exposed_and_overlapped_add_up_over_the_window(summary: Summary) -> None:
    assert summary.seconds == pytest.approx(4000e-9)  # from 1000 to 5000
    zero, one = summary.ranks
    assert zero.exposed == pytest.approx((1010 + 20 + 100) * 1e-9)
    assert zero.overlapped == pytest.approx(1890e-9)  # the second call but for its issue and its wait
    assert zero.waiting == pytest.approx(400e-9)
    assert (one.exposed, one.waiting) == (pytest.approx((620 + 20 + 100) * 1e-9), 0)
    assert summary.exposed == pytest.approx((1130 + 740) / 2 / 4000)
    assert summary.share == pytest.approx((1130 + 740 + 2 * 1890) / 2 / 4000)


def test_a_main_thread_that_stands_still_outside_is_exposed(tmp_path: Path) -> None:
    """As in DDP's backward: from 1010 on it computes for 500 ns, then waits where nothing of ours sees it."""
    issue = ["allreduce", 990, 1010, MAIN, "train.py:8 in step"]
    marks = [[1010, 70], [2010, 570], [3000, 1560]]
    write(tmp_path, 0, calls=[call(1, 1000, 2000)], spans=[issue], marks=marks)
    write(tmp_path, 1, calls=[call(1, 1900, 2000)], spans=[["allreduce", 1890, 2010, MAIN, "train.py:8 in step"]])
    records = read_one(tmp_path)
    assert records[0].still == [(1510, 2000)]
    zero, one = summarize(records, lambda *_: 0.0).ranks
    assert (zero.exposed, zero.overlapped) == (pytest.approx((10 + 490) * 1e-9), pytest.approx(500e-9))
    assert zero.waiting == pytest.approx((10 + 390) * 1e-9)
    assert (one.exposed, one.overlapped) == (pytest.approx(110e-9), 0)


def test_the_slowest_rank_is_named(summary: Summary) -> None:
    assert [(rank.late, rank.last) for rank in summary.ranks] == [(0.0, 0.0), (pytest.approx(200e-9), 0.5)]
    assert (summary.slowest, summary.clearly) == (1, False)
    assert "the slowest is rank 1, though not by much: last to come in 50% of the calls" in summary.words()[1]


def test_a_rank_that_is_always_last_is_clearly_slow(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, calls=[call(k, 1000 * k + 300 * (rank == 0), 1000 * k + 500) for k in range(1, 9)])
    summary = summarize(read_one(tmp_path), lambda *_: 0.0)
    assert (summary.slowest, summary.clearly) == (0, True)
    assert summary.ranks[0].last == 1.0


def test_ranks_without_a_record_are_named_and_nobody_is_called_slow(tmp_path: Path) -> None:
    everybody = {"abc": [0, 1, 2, 3]}
    write(tmp_path, 1, calls=[call(1, 1000, 2000, ranks=[0, 1, 2, 3])], groups=everybody)
    summary = summarize(read_one(tmp_path), lambda *_: 0.0)
    assert (summary.slowest, summary.clearly, summary.missing) == (None, False, (0, 2, 3))
    first, *rest = summary.words()
    assert first.startswith("1 rank, ")
    assert rest == [
        "ranks 0, 2, 3 left no record (killed, or made no call); the numbers are of the others",
        "no rank is called slow: there is no collective of which several ranks left a record",
    ]
    page = report_page(summary, "trace.json", "")
    assert "ranks 0, 2, 3 left no record" in page
    assert "slowest" not in page


def test_messages_alone_make_nobody_slow(tmp_path: Path) -> None:
    for rank in (0, 1):
        way = {"message": "the default group, messages 0->1", "op": "send" if rank == 0 else "recv"}
        write(tmp_path, rank, calls=[call(1, 1000 + 500 * rank, 2000, **way)])
    assert summarize(read_one(tmp_path), lambda *_: 0.0).slowest is None


def test_kinds_of_calls_by_place(summary: Summary) -> None:
    async_call, sync_call = summary.top
    assert (sync_call.site, sync_call.count, sync_call.mean) == ("train.py:5 in step", 1, pytest.approx(800e-9))
    assert (sync_call.wait, sync_call.reduce) == (pytest.approx(400 / 1600), pytest.approx(600 / 1600))
    assert sync_call.wait + sync_call.move + sync_call.reduce == pytest.approx(1)
    assert sync_call.bound == pytest.approx(102.4 / 600)  # 1200 ns on two ranks beyond waiting
    assert async_call.seconds == pytest.approx(2000e-9)


def test_calls_of_disjoint_groups_are_counted_per_rank(tmp_path: Path) -> None:
    for rank in range(4):
        group = {"memory": f"m{rank // 2}", "group": "group", "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
        calls = [call(k, 1000 * k, 1000 * k + 300, **group) for k in range(1, 6)]
        write(tmp_path, rank, calls=calls, groups={"abc": [0, 1, 2, 3]})
    (kind,) = summarize(read_one(tmp_path), lambda *_: 0.0).top
    assert (kind.count, kind.seconds, kind.mean) == (5, pytest.approx(1500e-9), pytest.approx(300e-9))


def test_the_page_holds_the_numbers_and_nothing_from_outside(summary: Summary) -> None:
    page = report_page(summary, "trace.json", "copies fast")
    assert "train.py --lr &lt;1&gt;" in page
    for text in ("71 %", "23 %", "47 %", "rank 1", "all_reduce(float32 [256], SUM)", "train.py:5 in step", "17 %"):
        assert text in page, text
    assert "<script" not in page
    assert page.count('<div class="scroll"><table') == page.count("<table") == 3  # in a narrow window they scroll
    assert "@media (max-width: 700px)" in page
    assert page.count("http") == 1  # where to open the trace
