"""Drawings of programs: pictures reviewed as diffs, and drawings read back into the rows they show.

After a wanted change of the pictures, UPDATE_GOLDEN=1 writes them anew; look at the diff before committing it.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from unisono.algorithms import build, list_algorithms
from unisono.drawing import draw
from unisono.drawing.colours import chunk_colour
from unisono.errors import UsageError
from unisono.program import PLACEMENTS, Place, Program, Row, Unfit, lower

GOLDEN = Path(__file__).parents[1] / "golden" / "draw_programs"
PICTURES = {
    "two_phase_4_mailbox": ("two_phase", "all_reduce", 4, "mailbox", 80),
    "two_phase_4_mailbox_wide": ("two_phase", "all_reduce", 4, "mailbox", 120),
    "two_phase_4_direct": ("two_phase", "all_reduce", 4, "direct", 80),
    "ring_3_staged": ("ring", "all_reduce", 3, "staged", 80),
    "ring_8_ranks_left_out": ("ring", "all_reduce", 8, "staged", 80),
    "ring_32_meetings_left_out": ("ring", "all_reduce", 32, "staged", 80),
    "ring_3_messages": ("ring", "all_reduce", 3, "messages", 80),
    "star_3_pushed": ("star", "broadcast", 3, "pushed", 80),
    "direct_8_numbers_of_chunks": ("direct", "all_to_all", 8, "direct", 120),
}
NAMES = {"in": "in", "out": "out", "s": "stage", "t": "temp", "m": "recvbuf"}
PLACE = re.compile(r"(?:([\d,-]+):)?(in|out|s|t|m)([\d,-]*)")


def _programs(algorithm: str, collective: str, ranks: int, placement: str) -> list[Program]:
    schedule = build(algorithm, collective, ranks, chunks=3 if placement == "pushed" else 1)
    return [lower(schedule, rank, placement) for rank in range(ranks)]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    *what, width = PICTURES[name]
    picture = f"{draw(_programs(*what), width=width)}\n"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(picture, encoding="utf-8")
    assert picture == file.read_text(encoding="utf-8")
    assert max(map(len, picture.splitlines())) <= width


def test_no_picture_without_its_program() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(PICTURES)


def _numbers(words: str) -> list[int]:
    spans = [[int(x) for x in span.split("-")] for span in words.split(",")]
    return [number for span in spans for number in range(span[0], span[-1] + 1)]


def _places(words: str, chunks: list[int], spread: bool) -> list[list[Place]]:
    """Per row the places of one term; ``spread``: all its ranks belong to every row."""
    ranks, name, indices = PLACE.fullmatch(words).groups()  # type: ignore[union-attr]
    at = _numbers(indices) if indices else chunks
    who = _numbers(ranks) if ranks else [-1]
    count = len(chunks) if spread else max(len(chunks), len(at), len(who))
    at = at * count if len(at) == 1 else at
    rows = [who] * count if spread else [[rank] for rank in (who * count if len(who) == 1 else who)]
    return [[Place(NAMES[name], i, rank) for rank in row] for i, row in zip(at, rows, strict=True)]


def _read_line(line: str) -> Iterator[Row]:
    """The rows that one line stands for, without their steps."""
    words, rest = line.split(" ", 1)
    chunks = _numbers(words.removeprefix("c"))
    if match := re.fullmatch(r"(\S+) ([→←])(\d+)", rest):
        for chunk, places in zip(chunks, _places(match[1], chunks, False), strict=True):
            send = match[2] == "→"
            at, none = tuple(places), ()
            yield Row(
                "send" if send else "recv", 0, chunk, none if send else at, at if send else none, True, int(match[3])
            )
        return
    to, parts = (side.split(split) for side, split in zip(rest.split(" ← "), (", ", " + "), strict=True))
    complete = parts[-1] != "…"
    kind = "copy" if len(parts) == 1 and len(to) == 1 else "sum"
    kept = parts if complete else parts[:-1]
    targets = [_places(word, chunks, kind == "sum") for word in to]
    sources = [_places(word, chunks, kind == "sum") for word in kept]
    count = max(len(term) for term in targets + sources)
    for k, chunk in enumerate(chunks * count if len(chunks) == 1 else chunks):
        each = [tuple(p for term in side for p in term[min(k, len(term) - 1)]) for side in (targets, sources)]
        yield Row(kind, 0, chunk, *each, complete)


def _read(picture: str) -> list[Row]:
    """The rows in a drawing of one program that leaves nothing out."""
    lines = picture.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("step "))
    start = lines[head].index("rank")
    found: list[str] = []
    for line in lines[head + 2 : lines.index("", head)]:
        label, cell = line[:start].strip(), line[start:]
        if label in ("meet", "wait"):
            found.append(label)
        elif cell.startswith("  "):
            found[-1] += f" {cell.strip()}"
        elif cell != "·":
            found.append(cell)
    return [row for text in found for row in ([Row(text, 0)] if text in ("meet", "wait") else _read_line(text))]


@pytest.mark.parametrize(
    ("name", "collective"), [(e.name, e.collective) for e in list_algorithms() if e.collective != "barrier"]
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_drawing_shows_every_row(name: str, collective: str, placement: str) -> None:
    try:
        programs = _programs(name, collective, 4, placement)
    except Unfit:
        return
    except UsageError as problem:
        assert "switch" in str(problem)  # noqa: PT017
        return
    for program in programs:
        picture = str(draw([program], width=300, max_steps=1000))
        if "×" not in picture:
            assert _read(picture) == [replace(row, step=0) for row in program.rows]


def test_chunks_have_the_colour_they_have_in_schedules() -> None:
    console = Console(width=80, force_terminal=True, color_system="truecolor", legacy_windows=False)
    with console.capture() as shown:
        console.print(draw(_programs("ring", "all_reduce", 4, "staged")))
    red, green, blue = (int(chunk_colour(3, 4)[i : i + 2], 16) for i in (1, 3, 5))
    assert f"\x1b[38;2;{red};{green};{blue}mc3\x1b[0m" in shown.get()


def test_one_rank_has_the_whole_width() -> None:
    picture = str(draw(_programs("two_phase", "all_reduce", 8, "mailbox")[3:4]))
    assert picture.startswith("two_phase all_reduce · mailbox · rank 3 of 8 · 8 chunks · 2 meetings\n")
    assert "c3 out, 4-7:s3, 0-2:s2 ← 0-2:s2 + in + 4-7:s3\n" in picture


def test_programs_of_two_calls_are_refused() -> None:
    with pytest.raises(UsageError, match="programs of two calls: <ring all_reduce, staged: rank 0 of 4"):
        draw([*_programs("ring", "all_reduce", 4, "staged"), *_programs("ring", "all_reduce", 3, "staged")])
    with pytest.raises(UsageError, match="no program"):
        draw([])
