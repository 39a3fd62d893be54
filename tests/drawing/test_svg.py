"""The SVG pictures, read back: one arrow per message, in the colour of its chunk, dashed if it is copied."""

import re
from math import hypot
from xml.etree import ElementTree

import pytest

from unisono.algorithms import build
from unisono.drawing import STYLES, draw
from unisono.drawing.colours import chunk_colour
from unisono.drawing.svg import element, number
from unisono.errors import UsageError
from unisono.schedule import Collective, Schedule, Step, Transfer

SVG = "{http://www.w3.org/2000/svg}"
CASES = [("ring", 4), ("double_tree", 8), ("halving_doubling", 16), ("in_network", 8), ("one_shot", 4), ("ring", 1)]
ARROW = re.compile(r"(\d+)→(\d+) c(\S+) (reduced into|copied over)")


def _arrows(svg: str) -> list[tuple[str, ElementTree.Element]]:
    """(title, line) of every arrow, in the order of the picture."""
    groups = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    return [(str(g.findtext(f"{SVG}title")), g[1]) for g in groups]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_message_is_an_arrow(name: str, ranks: int, style: str) -> None:
    schedule = build(name, "all_reduce", ranks)
    arrows = _arrows(str(draw(schedule, "svg", style=style)))
    expected = {(t.src, t.dst, t.reduce) for step in schedule.explicit_steps() for t in step}
    total = sum(len({(t.src, t.dst, t.reduce) for t in step}) for step in schedule.explicit_steps())
    assert len(arrows) == total
    seen = set()
    for title, line in arrows:
        match = ARROW.fullmatch(title)
        assert match is not None
        reduces = match[4] == "reduced into"
        seen.add((int(match[1]), int(match[2]), reduces))
        first = int(re.split("[-,]", match[3])[0])
        assert line.get("stroke") == chunk_colour(first, schedule.collective.num_chunks)
        assert (line.get("stroke-dasharray") is None) == reduces
    assert seen == expected


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_everything_is_on_the_page(name: str, ranks: int, style: str) -> None:
    root = ElementTree.fromstring(str(draw(build(name, "all_reduce", ranks), "svg", style=style)))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    shifts: list[tuple[ElementTree.Element, float, float]] = [(root, 0.0, 0.0)]
    checked = 0
    while shifts:
        parent, x, y = shifts.pop()
        for child in parent:
            moved = re.fullmatch(r"translate\((\S+) (\S+)\)", child.get("transform", ""))
            dx, dy = (x + float(moved[1]), y + float(moved[2])) if moved else (x, y)
            shifts.append((child, dx, dy))
            for across, down in (("x", "y"), ("cx", "cy"), ("x1", "y1"), ("x2", "y2")):
                if child.get(across) is not None:
                    assert -0.01 <= dx + float(child.get(across, "")) <= width
                    assert -0.01 <= dy + float(child.get(down, "")) <= height
                    checked += 1
    assert checked > ranks


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_labels_of_a_ring_cover_no_rank_and_no_other_label(ranks: int) -> None:
    root = ElementTree.fromstring(str(draw(build("ring", "all_reduce", ranks), "svg", style="circle")))
    for panel in root.iter(f"{SVG}g"):
        circles = [
            (float(c.get("cx", "")), float(c.get("cy", "")), float(c.get("r", "")))
            for c in panel.findall(f"{SVG}circle")
        ]
        labels = [t for t in panel.findall(f"{SVG}text") if t.get("class") == "label"]
        places = [(float(t.get("x", "")), float(t.get("y", ""))) for t in labels]
        assert len(labels) == len(circles)
        for i, (x, y) in enumerate(places):
            assert all(hypot(x - cx, y - cy) > r for cx, cy, r in circles)
            assert all(abs(x - u) > 12 or abs(y - v) > 8 for u, v in places[:i])


def test_ranks_stand_on_a_circle_clockwise_from_the_top() -> None:
    root = ElementTree.fromstring(str(draw(build("ring", "all_gather", 4), "svg", style="circle")))
    circles = list(root.iter(f"{SVG}circle"))[:4]
    x = [float(c.get("cx", "")) for c in circles]
    y = [float(c.get("cy", "")) for c in circles]
    assert x[0] == x[2] == 0
    assert y[1] == y[3] == 0
    assert x[1] == -x[3] == y[2] == -y[0] > 0


def test_one_chunk_for_everybody_is_named_once() -> None:
    svg = str(draw(build("one_shot", "all_reduce", 8), "svg"))
    assert "step 0 · c0" in svg
    assert 'class="label"' not in svg


@pytest.mark.parametrize("style", STYLES)
def test_what_is_left_out_is_noted(style: str) -> None:
    step = Step.of(Transfer(0, 1, 0), Transfer(0, 9, 0))
    svg = str(draw(Schedule("long", Collective("all_reduce", 2, 1), (step,) * 70), "svg", style=style))
    assert "steps 64 to 69 not shown" in svg
    assert "not shown: 64 transfers of ranks or chunks that do not exist" in svg
    assert len(_arrows(svg)) == 64


@pytest.mark.parametrize("style", STYLES)
def test_too_many_ranks_are_refused(style: str) -> None:
    with pytest.raises(UsageError, match=r"ring all_reduce has 65 ranks and switches.*up to 64"):
        str(draw(build("ring", "all_reduce", 65), "svg", style=style))


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown style 'square': expected one of circle, rows"):
        str(draw(build("ring", "all_reduce", 4), "svg", style="square"))


def test_a_name_cannot_break_the_picture() -> None:
    svg = str(draw(Schedule("<b>&", Collective("all_reduce", 2, 1), ()), "svg"))
    assert ElementTree.fromstring(svg).findtext(f"{SVG}title") == "<b>& all_reduce · 2 ranks · 1 chunk · 0 steps"


@pytest.mark.parametrize(
    ("value", "words"), [(0.04, "0"), (-0.04, "0"), (12.0, "12"), (1180.25, "1180.2"), (-3.5, "-3.5")]
)
def test_numbers_are_short(value: float, words: str) -> None:
    assert number(value) == words


def test_attributes_are_quoted_and_none_is_left_out() -> None:
    assert element("a", "x", class_='"', stroke_width=1.0, fill=None) == '<a class=\'"\' stroke-width="1">x</a>'


@pytest.mark.parametrize("style", STYLES)
def test_a_small_picture_is_as_wide_as_its_title(style: str) -> None:
    schedule = Schedule("a_name_that_is_longer_than_its_picture", Collective("all_reduce", 2, 1), ())
    root = ElementTree.fromstring(str(draw(schedule, "svg", style=style)))
    assert float(root.get("width", "")) > 9 * len(str(root.findtext(f"{SVG}title")))


def test_hosts_are_boxes_around_the_rows_of_their_ranks() -> None:
    hosts = "0,3/1-2"
    svg = str(draw(build("columns", "all_reduce", 4, hosts=hosts), "svg", hosts=hosts))
    tree = ElementTree.fromstring(svg)
    names = {"".join(e.itertext()): float(e.get("y", "nan")) for e in tree.iter(f"{SVG}text")}
    boxes = [e for e in tree.iter(f"{SVG}rect") if e.get("class") == "line"]
    spans = [(float(b.get("y", "nan")), float(b.get("y", "nan")) + float(b.get("height", "nan"))) for b in boxes]
    for (top, bottom), ranks in zip(spans, ((0, 3), (1, 2)), strict=True):
        inside = {rank for rank in range(4) if top < names[f"rank {rank}"] < bottom}
        assert inside == set(ranks)
    assert spans[0][1] < spans[1][0]
    assert {"host 0", "host 1"} <= names.keys()
    with pytest.raises(UsageError, match="hosts 3x2 have 6 ranks, not 4"):
        draw(build("ring", "all_reduce", 4), "svg", hosts="3x2")
