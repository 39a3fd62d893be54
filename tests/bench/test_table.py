from dataclasses import replace

import pytest

from unisono.bench.result import Machine, Result, Row
from unisono.bench.settings import Settings
from unisono.bench.table import Table, footer, preamble

ROW = Row("all_reduce", "unisono", 8, 2, "float32", "sum", "in", 2, 10, (1e-5, 2e-5, 3e-5), 0, 1.0, 1e-9, "latency")
GLOO = replace(ROW, contender="gloo", seconds=(4e-5,))
REFUSED = replace(ROW, contender="unisono:ring", seconds=(), wrong=None, refused="no such thing")


def columns(table: Table) -> list[str]:
    return table.heading(ROW)[2].split()[1:]


def test_the_heading_says_whose_numbers_they_are() -> None:
    assert Table(["unisono:ring", "unisono"]).heading(ROW)[1] == "# all_reduce in place: unisono:ring"
    assert Table(["gloo"], 80).heading(ROW)[1] == "# all_reduce in place, float32, sum: gloo"
    assert Table(["gloo"], 80).heading(replace(ROW, collective="barrier", op="none"))[1] == "# barrier: gloo"


@pytest.mark.parametrize("rivals", [[], ["gloo"]])
@pytest.mark.parametrize("width", [80, 90, 100, 110, 125, None])
def test_lines_fit_the_screen(width: int | None, rivals: list[str]) -> None:
    table = Table(["unisono", *rivals], width)
    lines = [*table.heading(ROW)[2:], table.line(ROW, [GLOO][: len(rivals)])]
    assert all(len(line) <= (width or 200) for line in lines)
    assert len({len(line) for line in lines[1:]}) == 1
    assert {"size", "time", "busbw", "#wrong", *rivals} <= set(columns(table))


def test_nothing_is_left_out_without_need() -> None:
    full = columns(Table(["unisono"]))
    assert columns(Table(["unisono"], 120)) == full
    assert columns(Table(["unisono"], 100)) == [name for name in full if name not in ("type", "redop")]


def test_rivals_are_shown_beside_a_contender_that_refuses() -> None:
    refused, served = Table(["unisono:ring", "gloo"]).line(REFUSED, [GLOO]), Table(["x", "gloo"]).line(ROW, [GLOO])
    assert refused.split() == ["8", "2", "float32", "sum", "refused", "40.00"]
    assert served.split()[-2:] == ["40.00", "2.00"]
    assert refused.index("40.00") == served.index("40.00")


def test_on_gpus_the_host_is_timed_without_bandwidth() -> None:
    graph, eager = (replace(ROW, device="cuda", timing=timing) for timing in ("graph", "eager"))
    table = Table(["unisono"], on_gpu=True)
    assert not {"bound", "limit"} & set(columns(table))
    assert table.line(graph, []).split()[6:] == ["0.00", "0.00", "0"]
    assert table.line(eager, []).split()[6:] == ["0"]
    assert table.heading(eager)[1] == "# all_reduce in place, eager calls, the host's time: unisono"


def test_each_timing_of_gpus_is_compared_with_itself() -> None:
    rows = [replace(row, device="cuda", timing=timing, seconds=(seconds,)) for row, timing, seconds in
            ((ROW, "graph", 1e-5), (GLOO, "graph", 4e-5), (ROW, "eager", 2e-5), (GLOO, "eager", 3e-5))]  # fmt: skip
    printed = footer(Result({}, Machine(), rows=rows, complete=True))
    assert "# graph: gloo takes 4.00 times as long" in printed
    assert "# eager: gloo takes 1.50 times as long" in printed
    assert not any("avg bus bandwidth" in line for line in printed)


def test_one_of_a_kind_is_said_as_one() -> None:
    said = footer(Result({}, Machine(), rows=[ROW, replace(GLOO, wrong=None)], complete=True))
    assert "# gloo takes 2.00 times as long" in said
    assert "# the result checked is right" in said
    assert preamble(Result({}, Machine()), Settings(ranks=1, runs=1))[0] == "# 1 rank, not pinned; median of 1 run"


def test_calls_refused_for_one_reason_are_one_line() -> None:
    rows = [ROW, REFUSED, replace(REFUSED, collective="broadcast"), replace(REFUSED, nbytes=16, refused="other")]
    printed = footer(Result({}, Machine(), rows=rows, complete=True))
    assert printed[-2:] == [
        "# refused by unisono:ring all_reduce, broadcast: no such thing",
        "# refused by unisono:ring all_reduce: other",
    ]


def test_many_are_said_as_many() -> None:
    rows = [ROW, GLOO, replace(ROW, nbytes=16), replace(GLOO, nbytes=16, seconds=(8e-5,))]
    said = footer(Result({}, Machine(), rows=rows, complete=True))
    assert "# gloo takes 2.00 to 4.00 times as long, 4.00 in the middle" in said
    assert "# all 4 results checked are right" in said
