"""Gantt charts and traces of simulated runs, read back into the events they show."""

import json
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from unisono.algorithms import build
from unisono.drawing import draw
from unisono.drawing.colours import chunk_colour
from unisono.errors import UsageError
from unisono.schedule import Collective, Schedule, preset
from unisono.simulation import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def _run(name: str, ranks: int, topology: str = "nvlink", nbytes: int = 1 << 20) -> Timeline:
    return simulate(build(name, "all_reduce", ranks), preset(topology, ranks), nbytes)


RUNS = [_run("ring", 4), _run("double_tree", 8), _run("one_shot", 4), _run("in_network", 4, "infiniband")]
NAMES = [run.schedule.name for run in RUNS]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_the_trace_has_every_event_at_both_ends(run: Timeline) -> None:
    trace = json.loads(str(draw(run, "trace")))
    e = run.events
    for side, mine, other in (("sends", e.src, e.dst), ("receives", e.dst, e.src)):
        found = sorted(
            (
                x["pid"],
                x["args"]["to" if side == "sends" else "from"],
                x["ts"],
                x["dur"],
                x["args"]["nbytes"],
                x["args"]["reduce"],
            )
            for x in trace["traceEvents"]
            if x.get("cat") == side
        )
        expected = sorted(zip(mine, other, e.start * 1e6, (e.end - e.start) * 1e6, e.nbytes, e.reduce, strict=True))
        assert len(found) == len(expected)
        for got, want in zip(found, expected, strict=True):
            assert got == pytest.approx(want)


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_a_track_shows_one_thing_at_a_time_and_has_a_name(run: Timeline) -> None:
    events = json.loads(str(draw(run, "trace")))["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in (x for x in events if x["ph"] == "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
    assert {(x["pid"], x["tid"]) for x in events if x["name"] == "thread_name"} == set(tracks)
    names = {x["pid"]: x["args"]["name"] for x in events if x["name"] == "process_name"}
    assert names == {p: f"rank {p}" if p < run.schedule.world_size else f"switch {p}" for p, _ in tracks}


def test_an_arrow_joins_the_two_ends_of_a_message() -> None:
    events = json.loads(str(draw(RUNS[0], "trace")))["traceEvents"]
    ends: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in (x for x in events if x["name"] == "message"):
        ends[event["id"]][event["ph"]] = event
    assert len(ends) == len(RUNS[0].events)
    for i, pair in ends.items():
        assert (pair["s"]["pid"], pair["f"]["pid"]) == (RUNS[0].events.src[i], RUNS[0].events.dst[i])
        assert pair["s"]["ts"] <= pair["f"]["ts"]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_bars_of_the_chart_are_as_long_as_the_messages(run: Timeline) -> None:
    root = ElementTree.fromstring(str(draw(run, "gantt")))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    e, num_chunks = run.events, run.schedule.collective.num_chunks
    assert len(bars) == 2 * len(e)
    scale = 1000 / max(run.time, float(e.end.max()))
    expected = [
        (rank, track, e.start[i], e.end[i], chunk_colour(int(e.chunk[i]), num_chunks))
        for rank in range(run.schedule.world_size + run.schedule.switches)
        for track, ranks in ((0, e.src), (1, e.dst))
        for i in range(len(e))
        if ranks[i] == rank
    ]
    for bar, (rank, track, start, end, colour) in zip(bars, expected, strict=True):
        assert bar.get("fill") == colour
        assert float(bar.get("x", "")) == pytest.approx(76 + start * scale, abs=0.06)
        assert float(bar.get("width", "")) == pytest.approx((end - start) * scale - 0.8, abs=0.06)
        assert float(bar.get("y", "")) == pytest.approx(70 + 30 * rank + (2, 16)[track])


def test_the_text_chart_of_a_ring() -> None:
    lines = str(draw(RUNS[0], width=70)).splitlines()
    assert lines[0].startswith("ring all_reduce · 4 ranks · 1 MiB over nvlink in ")
    rows = lines[2:10]
    assert all(len(row) <= 70 for row in rows)
    for rank in range(4):
        sends, receives = rows[2 * rank], rows[2 * rank + 1]
        assert sends.startswith(f"rank {rank} → ")
        assert receives.startswith("       ← ")
        order = [(rank - 1 - step) % 4 for step in range(3)] + [(rank - step) % 4 for step in range(3)]
        assert re.findall(r"c(\d)", sends) == [str(c) for c in order]
        assert re.findall(r"c(\d)", receives) == [str((c - 1) % 4) for c in order]
        assert "━" in sends.split("╌")[0]
        assert "━" not in sends[sends.index("╌") :]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
@pytest.mark.parametrize("width", [24, 80, 200])
def test_the_text_chart_keeps_to_its_width(run: Timeline, width: int) -> None:
    rows = [line for line in str(draw(run, width=width)).splitlines() if "→ " in line[:12] or "← " in line[:12]][:-1]
    assert len(rows) >= 2 * run.schedule.world_size
    assert all(len(row) <= width for row in rows)


def test_many_ranks_are_cut_in_text_and_refused_in_a_picture() -> None:
    run = _run("ring", 80)
    assert "ranks 31 to 78 not shown" in str(draw(run))
    with pytest.raises(UsageError, match="over 80 ranks makes 12640 messages, a chart shows up to 64 ranks"):
        str(draw(run, "gantt"))


def test_nothing_to_do_is_an_empty_chart() -> None:
    run = simulate(Schedule("idle", Collective("all_reduce", 2, 1), ()), preset("nvlink", 2), 8)
    assert str(draw(run)).splitlines()[2:4] == ["rank 0 →", "       ←"]
    assert ElementTree.fromstring(str(draw(run, "gantt"))).tag == f"{SVG}svg"
    assert json.loads(str(draw(run, "trace")))["traceEvents"] == []
