"""The text of programs: it reads back, and what stands in golden files is what is lowered.

After a wanted change, UPDATE_GOLDEN=1 writes the files anew; look at the diff before committing it.
"""

import os
from pathlib import Path

import pytest

from unisono.algorithms import build, list_algorithms
from unisono.algorithms.registry import AlgorithmInfo
from unisono.errors import UsageError
from unisono.program import PLACEMENTS, Program, Unfit, lower
from unisono.program.defaults import TABLE
from unisono.schedule import Schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "programs"
RUN = [e for e in list_algorithms() if not e.simulation_only]


def same(one: Program, other: Program) -> bool:
    return vars_of(one) == vars_of(other)


def vars_of(program: Program) -> dict[str, object]:
    return {name: getattr(program, name) for name in Program.__dataclass_fields__}


@pytest.mark.parametrize("entry", RUN, ids=lambda e: f"{e.name}-{e.collective}")
def test_text_reads_back(entry: AlgorithmInfo) -> None:
    read = 0
    for n in (2, 3, 4):
        try:
            schedule = build(entry.name, entry.collective, n)
        except UsageError:
            continue
        for placement in PLACEMENTS:
            for deterministic in (False, True):
                for rank in range(n):
                    try:
                        program = lower(schedule, rank, placement, deterministic)
                    except Unfit:
                        continue
                    assert same(Program.from_text(program.to_text()), program)
                    read += 1
    assert read


def test_equal_schedules_keep_their_names() -> None:
    """Ring and recursive doubling do the same over 2 ranks."""
    names = ("ring", "recursive_doubling")
    one, other = (build(name, "all_gather", 2) for name in names)
    assert one == other
    assert tuple(lower(schedule, 0).schedule for schedule in (one, other, one, other)) == names * 2


def test_a_line_that_cannot_be_read_is_named() -> None:
    text = lower(build("ring", "all_reduce", 2), 0).to_text()
    with pytest.raises(UsageError, match="line 1: expected 'program NAME"):
        Program.from_text(text.replace("program", "programme", 1))
    with pytest.raises(UsageError, match="line 2: expected 'step S: KIND"):
        Program.from_text(text.replace("step 0: ", "step 0 ", 1))
    with pytest.raises(UsageError, match=r"line 2: 'stages\[0\]' is no place"):
        Program.from_text(text.replace("stage[0]", "stages[0]", 1))


def _cases() -> dict[str, tuple[Schedule, str]]:
    found = {}
    for row in TABLE:
        for placement in dict.fromkeys((row.placement, *(("direct",) if row.directly else ()), row.directly)):
            if placement:
                found[f"{row.schedule}_{row.collective}_{placement}"] = (row.build(4), placement)
    for name, placements in {
        "ring": ("staged", "put", "direct", "messages"),
        "double_tree": ("staged", "direct"),
        "halving_doubling": ("staged", "direct"),
        "two_phase": ("put", "messages"),
    }.items():
        for placement in placements:
            found[f"{name}_all_reduce_{placement}"] = (build(name, "all_reduce", 4), placement)
    return found


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case: str) -> None:
    schedule, placement = CASES[case]
    text = "\n".join(lower(schedule, rank, placement).to_text() for rank in range(4))
    file = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_text_without_its_program() -> None:
    assert {f.stem for f in GOLDEN.glob("*.txt")} == set(CASES)
