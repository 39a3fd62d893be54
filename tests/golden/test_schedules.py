"""Small schedules as pictures, to be reviewed as diffs.

Each file holds the text form and the life of one chunk. After a wanted change, UPDATE_GOLDEN=1 writes them anew; look
at the diff before committing it.
"""

import os
from pathlib import Path

import pytest

from unisono.algorithms import build, list_algorithms
from unisono.schedule.picture import life_of_chunk

HERE = Path(__file__).parent

CASES = sorted(
    {(e.name, e.collective) for e in list_algorithms() if e.collective != "barrier"} | {("bruck", "barrier")},
)


def _picture(name: str, collective: str) -> str:
    schedule = build(name, collective, 4)
    chunk = schedule.collective.num_chunks // 2
    return f"{schedule.to_text()}\n{life_of_chunk(schedule, chunk, range(schedule.num_steps))}\n"


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_four_ranks(name: str, collective: str) -> None:
    file = HERE / f"{name}_{collective}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(_picture(name, collective), encoding="utf-8")
    assert _picture(name, collective) == file.read_text(encoding="utf-8")


def test_no_picture_without_its_schedule() -> None:
    assert {f.stem for f in HERE.glob("*.txt")} == {f"{name}_{collective}" for name, collective in CASES}
