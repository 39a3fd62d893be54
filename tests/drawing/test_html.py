"""The page: its data replayed by a few lines of our own, and nothing fetched from anywhere."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from unisono.algorithms import build
from unisono.drawing import draw
from unisono.errors import UsageError
from unisono.schedule import Collective, Schedule, Step, Transfer


class _Page(HTMLParser):
    """Tags with attributes, and the text of scripts by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and data.strip():
            self.scripts.append(data)


def _data(schedule: Schedule) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_Page(str(draw(schedule, "html"))).scripts[0])
    return data


def _replayed(data: dict[str, Any], held: dict[tuple[int, int], list[int]]) -> list[dict[tuple[int, int], list[int]]]:
    """What each (rank, chunk) holds after each step: sorted contributors, with repeats."""
    after = [held]
    for step in data["steps"]:
        old, new = after[-1], dict(after[-1])
        for m in sorted(step, key=lambda m: m["reduce"]):
            for chunk in m["chunks"]:
                kept = new.get((m["dst"], chunk), []) if m["reduce"] else []
                new[m["dst"], chunk] = sorted(kept + old.get((m["src"], chunk), []))
        after.append(new)
    return after


@pytest.mark.parametrize(
    ("name", "collective", "ranks"),
    [
        ("ring", "all_reduce", 4),
        ("double_tree", "all_reduce", 8),
        ("bruck", "all_to_all", 5),
        ("in_network", "all_reduce", 4),
    ],
)
def test_the_states_are_those_of_the_steps(name: str, collective: str, ranks: int) -> None:
    data = _data(build(name, collective, ranks))
    shown: dict[tuple[int, int], list[int]] = {}
    shown.update({(rank, chunk): ranks_ for rank, chunk, _, ranks_, _ in data["changes"][0]})
    assert len(shown) == (data["ranks"] + data["switches"]) * data["chunks"]
    expected = _replayed(data, dict(shown))
    assert len(data["changes"]) == len(data["steps"]) + 1
    for k, changed in enumerate(data["changes"]):
        shown.update({(rank, chunk): ranks_ for rank, chunk, _, ranks_, _ in changed})
        assert shown == {cell: expected[k].get(cell, []) for cell in shown}
    for rank in range(data["ranks"]):
        for chunk in range(data["chunks"]):
            assert not data["goal"][rank][chunk] or len(shown[rank, chunk]) == data["wanted"][chunk]


def test_a_contribution_that_comes_twice_is_marked() -> None:
    step = Step.of(Transfer(0, 1, 0, 1, True))
    data = _data(Schedule("twice", Collective("all_reduce", 2, 1), (step, step)))
    assert data["changes"][2] == [[1, 0, "2×0+1", [0, 1], [0]]]


def test_nothing_comes_from_elsewhere() -> None:
    page = str(draw(build("ring", "all_reduce", 4), "html"))
    assert re.findall(r"https?://[^\"' ]*", page) == ["http://www.w3.org/2000/svg"]
    assert not [a for _, a in _Page(page).tags if a.keys() & {"src", "href"}]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page)


def test_the_script_finds_its_elements() -> None:
    page = _Page(str(draw(build("ring", "all_reduce", 4), "html")))
    ids = {a["id"] for _, a in page.tags if "id" in a}
    assert {"play", "forward", "back", "first", "last", "slider"} <= ids
    wanted = set(re.findall(r'byId\("(\w+)"\)', page.scripts[1]))
    assert wanted <= ids
    assert all(f"{name}()" in page.scripts[1] for name in ("play", "forward", "back", "first", "last"))


def test_a_name_cannot_break_the_page() -> None:
    page = str(draw(Schedule("</script><b>", Collective("all_reduce", 2, 1), (Step.of(Transfer(0, 9, 0)),)), "html"))
    assert "<title>&lt;/script&gt;&lt;b&gt; all_reduce" in page
    assert page.count("</script>") == 2
    assert (
        "1 transfers of ranks"
        in _data(Schedule("x", Collective("all_reduce", 2, 1), (Step.of(Transfer(0, 9, 0)),)))["notes"][0]
    )


@pytest.mark.parametrize(
    ("name", "collective", "ranks", "words"),
    [
        ("ring", "all_reduce", 33, "up to 32"),
        ("bruck", "all_to_all", 17, "too large for a page"),
        ("ring", "all_reduce", 24576, "too large"),
    ],
)
def test_too_much_to_look_at_is_refused(name: str, collective: str, ranks: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        str(draw(build(name, collective, ranks), "html"))
