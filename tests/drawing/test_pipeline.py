import json
import xml.etree.ElementTree as ET

import pytest

from unisono.algorithms import build
from unisono.algorithms.pipelines import SCHEDULES, build_pipeline
from unisono.drawing import draw
from unisono.errors import UsageError
from unisono.simulation import PipelineCosts, PipelineTimeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> list[ET.Element]:
    return [rect for rect in ET.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_bar_per_action_in_the_row_of_its_rank(name: str) -> None:
    line = simulate(build_pipeline(name, 3, 5))
    found = bars(str(draw(line, "svg")))
    titles = [bar.find(f"{SVG}title").text for bar in found]
    slots = [slot for row in line.slots for slot in row]
    assert [words.split(":")[0] for words in titles] == [str(slot.action) for slot in slots]
    heights = sorted({float(bar.get("y")) for bar in found})
    rank = {slot.action: r for r, row in enumerate(line.slots) for slot in row}
    assert [heights.index(float(bar.get("y"))) for bar in found] == [rank[slot.action] for slot in slots]
    widths = [float(bar.get("width")) + 0.8 for bar in found]
    scale = widths[0] / (slots[0].end - slots[0].start)
    assert widths == pytest.approx([scale * (slot.end - slot.start) for slot in slots], abs=0.11)


def test_svg_tells_kinds_apart_and_makes_later_stages_paler() -> None:
    svg = str(draw(build_pipeline("zb-v", 2, 3), "svg"))
    shown = {bar.find(f"{SVG}title").text[:2]: (bar.get("fill"), float(bar.get("fill-opacity"))) for bar in bars(svg)}
    assert len({fill for fill, _ in shown.values()}) == 3
    assert shown["0F"][0] == shown["3F"][0]
    assert shown["0F"][1] > shown["3F"][1]
    assert "zb-v · 4 stages on 2 ranks · 3 microbatches · bubble 0.0%" in svg
    assert "0F0: forward of stage 0, microbatch 0, 0 to 1" in svg


def test_text_at_a_given_width_keeps_the_kinds() -> None:
    drawn = str(draw(build_pipeline("1f1b", 2, 3), width=32)).splitlines()[3:]
    assert drawn[0] == "rank 0  F━F━····BW━━F━BW━━··BW━━"
    assert drawn[1] == "rank 1  ··F━BW━━F━BW━━F━BW━━····"
    assert " ".join(drawn[4:]) == (
        "stage, kind, microbatch, F forward, BW both gradients, · idle "
        "names are cut where they do not fit: 68 columns show all"
    )
    whole = str(draw(build_pipeline("1f1b", 2, 3), width=68))
    assert "names are cut" not in whole
    assert all(name in whole for name in ("0F0", "0F1", "0F2", "1BW0", "1BW1", "1BW2"))


def test_actions_that_take_no_time_do_not_stretch_the_picture() -> None:
    line = simulate(build_pipeline("zb-h1", 2, 2), costs=PipelineCosts(1, 1, 0))
    assert str(draw(line)).splitlines()[3] == "rank 1  ····1F0━1B0━1F1━1B1━····"
    nothing = simulate(build_pipeline("gpipe", 1, 1), costs=PipelineCosts(0, 0, 0))
    assert "rank 0" in str(draw(nothing))
    assert "bubble 0.0%" in str(draw(nothing, "svg"))


def test_what_nobody_could_read_is_refused() -> None:
    row = simulate(build_pipeline("gpipe", 1, 3)).slots[0]
    line = PipelineTimeline(build_pipeline("gpipe", 1, 3), (row * 4000,))
    for form in ("text", "svg", "gantt"):
        with pytest.raises(UsageError, match="24000 actions are too many to draw, 20000 is the most"):
            draw(line, form)
    with pytest.raises(UsageError, match="draw a timeline or a pipeline as svg"):
        draw(line, "html")


def test_the_trace_has_every_action_on_the_track_of_its_rank() -> None:
    line = simulate(build_pipeline("zb-h1", 3, 4))
    events = [event for event in json.loads(str(draw(line, "trace")))["traceEvents"] if event["ph"] == "X"]
    found = [(event["pid"], event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events]
    assert found == [(r, str(a), s, e - s) for r, row in enumerate(line.slots) for a, s, e in row]


@pytest.mark.parametrize("format", ["text", "svg", "trace"])
def test_costs_of_what_is_no_pipeline_are_refused(format: str) -> None:
    schedule = build("ring", "all_reduce", 3)
    for subject in (schedule, simulate(schedule), simulate(build_pipeline("1f1b", 2, 2))):
        with pytest.raises(UsageError, match=r"^costs are what the schedule of a pipeline is simulated with: leave"):
            draw(subject, format, costs=PipelineCosts())


@pytest.mark.parametrize("option", [{"style": "circle"}, {"topology": "nvlink"}, {"nbytes": "1MiB"}])
def test_what_a_pipeline_does_not_have_is_refused(option: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"^1f1b is of a pipeline, which has no {next(iter(option))}: leave it out$"):
        draw(build_pipeline("1f1b", 2, 3), "svg", **option)
