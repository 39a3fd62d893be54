"""Pieces that overlap over hosts: proved alone and behind other calls; data from elsewhere is read late enough."""

from collections.abc import Iterator

import pytest

from unisono.algorithms import build
from unisono.program import Table, bind, lower
from unisono.program.bind import DST, DST_AT, INTO, KIND, LAG, LEFT, MEET, MOST, PART, SHRINK, SRC, SRC_AT, SUM, Bases
from unisono.program.proof import Call, prove_calls
from unisono.program.slots import LATE, overlap_of

AREA = 4096
HOSTS = {
    "2x2": ((0, 1), (2, 3)),
    "3+1": ((0, 1, 2), (3,)),
    "by turns": ((0, 2), (1, 3)),
    "4x1": ((0,), (1,), (2,), (3,)),
}
KINDS = [
    ("prefix", "all_reduce"), ("prefix", "reduce"), ("one_shot", "all_reduce"), ("direct", "all_gather"),
    ("direct", "all_to_all"), ("direct", "reduce_scatter"), ("star", "broadcast"), ("star", "scatter"),
    ("star", "gather"), ("star", "reduce"), ("ring", "all_reduce"),
]  # fmt: skip


def call(
    algorithm: str, collective: str, hosts: str, size: int, uneven: bool = False, placement: str = "staged",
    itemsize: int = 1, wide: int = 0,
) -> Call:  # fmt: skip
    """A call of blocks of ``size`` bytes."""
    given = {"hosts": HOSTS[hosts]} if algorithm == "prefix" else {}
    schedule = build(algorithm, collective, 4, 0, **given)
    blocks = [size] * (schedule.collective.num_chunks // schedule.collective.pieces)
    overlap = overlap_of(schedule, placement, False, HOSTS[hosts])
    made = [
        bind(
            lower(schedule, rank, placement), blocks, area=AREA, uneven=uneven, crosses=True, overlap=overlap,
            itemsize=itemsize, wide=wide,
        )
        for rank in range(4)
    ]  # fmt: skip
    return Call(tuple(made), tuple(blocks))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("algorithm", "collective"), KINDS)
def test_calls_of_pieces_that_overlap_hold_one_after_the_other(algorithm: str, collective: str, hosts: str) -> None:
    several = call(algorithm, collective, hosts, 60_000)
    assert several.tables[0].late == LATE - 1
    short, folded = (
        call(algorithm, collective, hosts, 100),
        call("two_phase", "all_reduce", hosts, 20_000, placement="mailbox"),
    )
    proof = prove_calls([several, short, several, folded, several, several], area=AREA)
    proof.raise_if_bad()
    if algorithm == "prefix":
        assert proof.rank_order


@pytest.mark.parametrize("size", [1000, 3000, 9000, 41_000])
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
def test_uneven_calls_stage_alike_before_the_first_meeting_whatever_the_sizes(collective: str, size: int) -> None:
    found, longer = (call("direct", collective, "2x2", each, uneven=True) for each in (size, 50_000))
    prove_calls([found, longer, found], area=AREA).raise_if_bad()
    assert staged_first(found.tables[0]) == staged_first(longer.tables[0])


def staged_first(table: Table) -> set[tuple[int, ...]]:
    """What is staged before the first meeting: places there, and bytes at most."""
    rows = table.rows.tolist()
    begin = rows[: [row[KIND] for row in rows].index(MEET)]
    staged = [row for row in begin if row[LAG] == 0 and row[DST] >= Bases(4).stages]
    return {(row[DST], row[DST_AT], row[MOST]) for row in staged}


def test_accumulators_take_their_room() -> None:
    found = call("prefix", "all_reduce", "2x2", 40_000, itemsize=2, wide=4)
    prove_calls([found, found], area=AREA).raise_if_bad()


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("algorithm", "collective"), KINDS)
def test_what_comes_from_elsewhere_is_read_late(algorithm: str, collective: str, hosts: str) -> None:
    host = {rank: number for number, ranks in enumerate(HOSTS[hosts]) for rank in ranks}
    written, read = set(), []
    for table in call(algorithm, collective, hosts, 60_000).tables:
        for met, owner, place, reads in staging_accesses(table):
            if not reads:
                written.add((owner, place, met))
            elif host[owner] != host[table.program.rank]:
                read.append((owner, place, met))
    assert read
    for owner, place, met in read:
        staged = max(before for other, there, before in written if (other, there) == (owner, place) and before < met)
        assert met - staged == LATE


def staging_accesses(table: Table) -> Iterator[tuple[int, int, tuple[int, int], bool]]:
    """Meetings before each access to staging memory; its owner, its half and offset, whether it reads."""
    met, stages, head = 0, Bases(4).stages, table.rows[0].tolist()
    for iteration in range(table.pieces + table.lags):
        for row in table.rows.tolist():
            if row[KIND] == MEET:
                met += iteration < table.pieces + row[LEFT]
                continue
            head = head if row[KIND] in (PART, INTO) else row
            piece = iteration - row[LAG]
            if row[KIND] == SUM or not 0 <= piece < table.pieces or head[LEFT] <= piece * head[SHRINK]:
                continue
            if row[KIND] != INTO and row[SRC] >= stages:
                half, owner = divmod(row[SRC] - stages, 4)
                yield met, owner, (half & 1, row[SRC_AT]), True
            if row[KIND] != PART and row[DST] >= stages:
                half, owner = divmod(row[DST] - stages, 4)
                yield met, owner, (half & 1, row[DST_AT]), False


def test_what_keeps_memory_between_its_parts_does_not_overlap() -> None:
    schedule = build("columns", "all_reduce", 4, 0, hosts=HOSTS["2x2"])
    assert overlap_of(schedule, "staged", False, HOSTS["2x2"]) is None
    assert overlap_of(build("two_phase", "all_reduce", 4, 0), "mailbox", False, HOSTS["2x2"]) is None
