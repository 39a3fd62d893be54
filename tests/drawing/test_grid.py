"""The text grid: pictures reviewed as diffs, and grids read back into the transfers they show.

After a wanted change of the pictures, UPDATE_GOLDEN=1 writes them anew; look at the diff before committing it.
"""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from unisono.algorithms import build, list_algorithms
from unisono.drawing import draw
from unisono.drawing.colours import chunk_colour
from unisono.schedule import Collective, Schedule, Step, Transfer

GOLDEN = Path(__file__).parents[1] / "golden" / "draw_grids"
PICTURES = {
    "ring_4": ("ring", "all_reduce", 4, 80),
    "double_tree_8": ("double_tree", "all_reduce", 8, 80),
    "halving_doubling_8_squeezed": ("halving_doubling", "all_reduce", 8, 80),
    "halving_doubling_16_ranks_as_rows": ("halving_doubling", "all_reduce", 16, 80),
    "ring_32_with_gaps": ("ring", "all_reduce", 32, 80),
    "one_shot_8_everyone": ("one_shot", "all_reduce", 8, 80),
    "bruck_8_numbers_of_chunks": ("bruck", "all_to_all", 8, 80),
    "in_network_4_switch": ("in_network", "all_reduce", 4, 80),
    "one_rank": ("ring", "all_reduce", 1, 80),
    "columns_4_hosts": ("columns", "all_reduce", 4, 80),
}
HOSTS = {"columns_4_hosts": "0,3/1-2"}
PART = re.compile(r"([→←])(\S+) c(\S+?) ?([+=])")
Moves = set[tuple[int, int, int, int, bool]]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    algorithm, collective, ranks, width = PICTURES[name]
    hosts = HOSTS.get(name)
    options = {"hosts": hosts} if hosts is not None else {}
    picture = f"{draw(build(algorithm, collective, ranks, **options), width=width, hosts=hosts)}\n"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(picture, encoding="utf-8")
    assert picture == file.read_text(encoding="utf-8")
    assert max(map(len, picture.splitlines())) <= width


def test_no_picture_without_its_schedule() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(PICTURES)


def _numbers(words: str, everyone: list[int]) -> list[int]:
    if words == "all":
        return everyone
    spans = [[int(x) for x in span.split("-")] for span in words.split(",")]
    return [number for span in spans for number in range(span[0], span[-1] + 1)]


def _rows(picture: str) -> Iterator[tuple[int, list[str]]]:
    """(step, texts of the cells) for every line of a grid with ranks as columns."""
    lines = picture.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("step "))
    starts = [m.start() for m in re.finditer(r"\S+( \d+)?", lines[head])]
    step = -1
    for line in lines[head + 2 :]:
        if not line:
            return
        label, *cells = [line[a:b].strip() for a, b in pairwise([*starts, len(line) + 99])]
        step = int(label) if label else step
        yield step, cells


def _read(picture: str, nodes: int) -> tuple[Moves, Moves]:
    """(sent, received), each a set of (step, src, dst, chunk, reduce), from a grid that leaves nothing out."""
    sent: Moves = set()
    received: Moves = set()
    for step, cells in _rows(picture):
        assert len(cells) == nodes
        for rank, cell in enumerate(cells):
            match = PART.fullmatch(cell)
            if match is None:
                assert cell in ("", "·")
                continue
            for peer in _numbers(match[2], [n for n in range(nodes) if n != rank]):
                for chunk in _numbers(match[3], []):
                    src, dst = (rank, peer) if match[1] == "→" else (peer, rank)
                    (sent if match[1] == "→" else received).add((step, src, dst, chunk, match[4] == "+"))
    return sent, received


def _moves(schedule: Schedule) -> Moves:
    return {
        (i, t.src, t.dst, chunk, t.reduce)
        for i, step in enumerate(schedule.explicit_steps())
        for t in step
        for chunk in range(t.chunk, t.chunk + t.count)
    }


@pytest.mark.parametrize(
    ("name", "collective"), [(e.name, e.collective) for e in list_algorithms() if e.collective != "barrier"]
)
def test_the_grid_shows_every_transfer_at_both_ends(name: str, collective: str) -> None:
    schedule = build(name, collective, 4)
    picture = str(draw(schedule, width=4 * 40, max_steps=1000))
    sent, received = _read(picture, schedule.world_size + schedule.switches)
    assert sent == received == _moves(schedule)


transfers = st.builds(
    lambda src, hop, chunk, count, reduce: Transfer(src, (src + hop) % 5, chunk, count, reduce),
    st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.booleans(),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.lists(transfers, max_size=5).map(lambda ts: Step.of(*ts)), max_size=4))
def test_any_steps_can_be_read_back(steps: list[Step]) -> None:
    schedule = Schedule("any", Collective("all_reduce", 5, 6), tuple(steps))
    sent, received = _read(str(draw(schedule, width=200)), 5)
    assert sent == received == _moves(schedule)


def test_dots_and_notes_say_what_is_left_out() -> None:
    picture = str(draw(build("ring", "all_reduce", 100), width=60, max_steps=10))
    lines = picture.splitlines()
    assert re.fullmatch(r"step( r\d)+\s+.*… r99", lines[2].replace("  ", " ").replace("  ", " ")) is not None
    assert "steps 6 to 193 not shown" in lines
    shown = re.findall(r"r\d+", lines[2])
    assert f"ranks {len(shown) - 1} to 98 not shown" in lines
    assert [line[:5].strip() for line in lines[4:] if line[:5].strip(" ")][:11] == [
        *map(str, range(6)), "…", *map(str, range(194, 198)),
    ]  # fmt: skip


def test_a_crowded_cell_is_cut() -> None:
    step = Step.of(*(Transfer(0, 1 + i, i) for i in range(9)))
    lines = str(draw(Schedule("fan", Collective("all_reduce", 10, 9), (step,)), width=120)).splitlines()
    assert [line[6:14].strip() for line in lines[4:10]] == [
        "→1 c0 =",
        "→2 c1 =",
        "→3 c2 =",
        "→4 c3 =",
        "→5 c4 =",
        "…4 more",
    ]


def test_a_schedule_too_large_to_write_out_is_drawn_at_once() -> None:
    picture = str(draw(build("ring", "all_reduce", 24576)))
    assert picture.startswith("ring all_reduce · 24,576 ranks · 24,576 chunks · 49,150 steps\n")
    assert "ranks 4 to 24574 not shown" in picture


def test_transfers_of_ranks_that_do_not_exist_show_where_they_can() -> None:
    schedule = Schedule("bad", Collective("all_reduce", 2, 1), (Step.of(Transfer(0, 7, 3, 1, True)),))
    assert "→7 c3 +" in str(draw(schedule))


def test_rich_prints_it_in_the_colours_of_the_chunks() -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=80, legacy_windows=False)
    with console.capture() as captured:
        console.print(draw(build("ring", "all_reduce", 4)))
    red, green, blue = (int(chunk_colour(3, 4)[i : i + 2], 16) for i in (1, 3, 5))
    assert f"→1 \x1b[38;2;{red};{green};{blue}mc3 +" in captured.get()


def test_no_width_is_too_small_and_no_length() -> None:
    schedule = build("ring", "all_reduce", 4)
    assert str(draw(schedule, width=0)) == str(draw(schedule, width=20))
    assert str(draw(schedule, max_steps=0)) == str(draw(schedule, max_steps=8))
