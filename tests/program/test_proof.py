"""The proof holds for everything that runs, and every way to spoil a table is found."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from program.default_tables import default_tables, prove_default
from unisono.algorithms import build, list_algorithms
from unisono.algorithms.registry import AlgorithmInfo
from unisono.errors import ScheduleError, UsageError
from unisono.program import Program, Table, Unfit, best_staged, bind, lower
from unisono.program.bind import (
    COPY,
    DST,
    INTO,
    KIND,
    LAG,
    LEFT,
    LINE,
    MEET,
    NARROW,
    PART,
    SRC,
    SRC_AT,
    SRC_STEP,
    SUM,
    WIDEN,
    Bases,
)
from unisono.program.defaults import _ANY, TABLE, Default
from unisono.program.proof import KINDS, Call, Proof, prove, prove_calls
from unisono.program.proof_play import Play
from unisono.schedule import Schedule
from unisono.schedule.collectives import ROOTED
from unisono.transport.layout import Layout
from unisono.verification import verify


def roots(collective: str, n: int) -> list[int]:
    return [0, n - 1] if collective in ROOTED else [0]


def num_blocks(schedule: Schedule) -> int:
    return schedule.collective.num_chunks // schedule.collective.pieces


# Every default.


def borders(row: Default, n: int) -> list[int]:
    """Sizes at and beside the borders of pieces and of the row, in bytes; elements of 4."""
    if row.collective == "barrier":
        return [0]
    found = {0, 4, LINE + 4}
    past = 1 << 26 if row.upto == _ANY else row.upto // n
    by_placement = default_tables(
        row.collective, past, n, area=Layout(n).stage, oversubscribed=bool(row.oversubscribed)
    )
    (*_, tables) = by_placement.values()
    for table in {tables[0], by_placement[row.placement][0]}:
        window = table.part * table.program.collective.pieces
        found |= {k * window + d for k in (1, 2) for d in (-LINE, -4, 0, 4, LINE)}
    edges = {row.directly_above, 0 if row.upto == _ANY else row.upto // n}
    found |= {edge + d for edge in edges for d in (-4, 0, 4)}
    return sorted(x for x in found if x >= 0)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.collective}-{row.schedule}")
def test_every_default_holds_around_every_border(row: Default, n: int) -> None:
    placements = set()
    for k, nbytes in enumerate(borders(row, n)[:: 1 if n < 4 else 2]):
        for root in roots(row.collective, n):
            for in_place in (False, True):
                for parity in (0, 1) if n == 2 else ((k + in_place) & 1,):
                    proofs = prove_default(
                        row.collective, nbytes, n, area=Layout(n).stage, root=root,
                        oversubscribed=bool(row.oversubscribed), in_place=in_place, first_meeting=parity,
                    )  # fmt: skip
                    placements |= proofs.keys()
                    for proof in proofs.values():
                        assert proof, f"{nbytes} B, root {root}, in place {in_place}, from meeting {parity}\n{proof}"
                        assert proof.rank_order
    if row.directly:
        assert {row.placement, "direct", row.directly} <= placements


@pytest.mark.parametrize("n", [6, 7, 8, 9])
def test_every_default_holds_for_more_ranks(n: int) -> None:
    for collective in sorted({row.collective for row in TABLE}):
        for nbytes in (0,) if collective == "barrier" else (4, 40_000, (1 << 20) + 4):
            for proof in prove_default(collective, nbytes, n, area=Layout(n).stage, root=0).values():
                assert proof, proof


def test_a_call_finds_nothing_amiss_in_what_another_left() -> None:
    n, area = 3, Layout(3).stage
    kinds = [(row.collective, 4) for row in TABLE] + [(row.collective, (1 << 20) + 4) for row in TABLE]
    calls = []
    for collective, nbytes in sorted(set(kinds)):
        size = 0 if collective == "barrier" else nbytes
        for tables in default_tables(collective, size, n, area=area).values():
            c = tables[0].program.collective
            calls.append(Call(tables, (size,) * (c.num_chunks // c.pieces)))
    for a in calls:
        for b in calls:
            proof = prove_calls([a, b, a], area)
            assert proof, proof


# Every algorithm, by name.


def lowered(schedule: Schedule, placement: str, deterministic: bool = False) -> list[Program]:
    return [lower(schedule, rank, placement, deterministic) for rank in range(schedule.world_size)]


def small_area(programs: Sequence[Program], itemsize: int = 1, wide: int = 1, lines: int = 4) -> int:
    """Room for four lines of every slot."""
    return lines * LINE * max(1, *(programs[0].slots or (programs[0].collective.world_size,))) * wide // itemsize


def schedules(entry: AlgorithmInfo, n: int) -> Iterator[Schedule]:
    for root in roots(entry.collective, n) if entry.rooted and n < 5 else [0]:
        for chunks in (1, 2) if root == 0 and n < 4 else (1,):
            try:
                yield build(entry.name, entry.collective, n, root, chunks)
            except UsageError:
                continue  # it is not for so many ranks


def hold(schedule: Schedule, in_place: bool, placement: str, deterministic: bool, itemsize: int) -> Iterator[Proof]:
    """Proofs of the programs for a few sizes, and in place where the schedule may be."""
    try:
        programs = lowered(schedule, placement, deterministic)
        if placement == "direct" and programs[0].partial and itemsize == 2:
            return  # 16 bits would round them: see below
        area = small_area(programs, itemsize, 4)
        c, longest = schedule.collective, 8 * LINE * schedule.collective.pieces + LINE + 4
        alias = in_place and not (placement == "direct" and c.name == "all_to_all")
        counts = (0,) if c.name == "barrier" else (0, 4, longest) if c.world_size < 4 else (longest,)
        for k, nbytes in enumerate(counts):
            sizes = [nbytes] * num_blocks(schedule)
            tables = [bind(p, sizes, area=area, itemsize=itemsize, wide=4) for p in programs]
            yield prove(tables, sizes, area, first_meeting=k & 1)
            if alias and c.world_size < 4:
                yield prove(tables, sizes, area, in_place=True, first_meeting=k & 1)
    except Unfit:
        assert placement not in ("staged", "put")


RUN = [e for e in list_algorithms() if not e.simulation_only]


@pytest.mark.parametrize("entry", RUN, ids=lambda e: f"{e.name}-{e.collective}")
def test_every_algorithm_holds_wherever_it_fits(entry: AlgorithmInfo) -> None:
    proofs = 0
    for n in (2, 3, 4 + RUN.index(entry) % 3):  # the larger by turns
        for schedule in schedules(entry, n):
            in_place = verify(schedule).in_place
            for placement in dict.fromkeys(("staged", best_staged(schedule), "put", "direct", "pushed")):
                for deterministic in (False, True) if schedule.collective.reduces and n < 5 else (False,):
                    for itemsize in (
                        (4, 2) if schedule.collective.reduces and not deterministic and n in (3, 4) else (4,)
                    ):
                        for proof in hold(schedule, in_place, placement, deterministic, itemsize):
                            proofs += 1
                            assert proof, f"{schedule.name}, {n} ranks, {itemsize} B an element\n{proof}"
                            assert proof.ordered
                            assert proof.rank_order or not deterministic
    assert proofs


def test_partial_sums_of_16_bits_do_not_go_between_tensors() -> None:
    """They are refused, or the proof tells; runtime/choice.py goes directly where no schedule has any."""
    programs = lowered(build("ring", "all_reduce", 3), "direct")
    try:
        tables = [bind(p, [600], area=1 << 10, itemsize=2, wide=4) for p in programs]
    except Unfit:
        return
    assert {finding.kind for finding in prove(tables, [600], 1 << 10).findings} == {"width"}


UNEVEN = [
    (e.name, e.collective) for e in list_algorithms()
    if e.collective in ("all_to_all", "all_gather", "gather", "scatter") and not e.simulation_only
]  # fmt: skip


@pytest.mark.parametrize(("name", "collective"), UNEVEN)
def test_uneven_blocks_in_tensors_of_their_own(name: str, collective: str) -> None:
    chance = random.Random(0)
    for n in (2, 3, 4):
        try:
            schedule = build(name, collective, n)
        except UsageError:
            continue
        for placement in ("staged", "direct"):
            for turn in range(4):
                sizes = [4 * chance.choice((0, 1, 15, 16, 17, 64, 65, 200)) for _ in range(num_blocks(schedule))]
                try:
                    programs = lowered(schedule, placement)
                except Unfit:
                    continue
                area, listed = small_area(programs), (placement == "staged",) * 2
                tables = [bind(p, sizes, area=area, listed=listed, uneven=True) for p in programs]
                proof = prove(tables, sizes, area, first_meeting=turn & 1, listed=listed)
                assert proof, f"{sizes}\n{proof}"


def test_uneven_blocks_of_others_change_nothing_before_the_first_meeting() -> None:
    for name, collective in UNEVEN:
        program = lower(build(name, collective, 4), 1)
        blocks = program.blocks_in[1]
        staged = []
        for other in (4, 2000):
            sizes = [400 if block in blocks else other for block in range(num_blocks(build(name, collective, 4)))]
            table = bind(program, sizes, area=small_area([program]), listed=(True, True), uneven=True)
            first = table.rows[: int(np.argmax(table.rows[:, KIND] == MEET))]
            staged.append(first[first[:, DST] >= Bases(4).stages].tolist())
        assert staged[0] == staged[1]


# Mutants.


def mutants(table: Table) -> Iterator[tuple[str, int, Table]]:
    """Every single change of a kind to one row: what it is, the row, the table."""
    rows, bases = table.rows, Bases(table.size)

    def changed(*words: tuple[int, int, int]) -> Table:
        new = rows.copy()
        for k, word, value in words:
            new[k, word] = value
        return replace(table, rows=new)

    def without(first: int, last: int, *words: tuple[int, int, int]) -> Table:
        return replace(table, rows=np.delete(changed(*words).rows, range(first, last), 0))

    head = 0
    for k, row in enumerate(rows.tolist()):
        kind = row[KIND]
        if kind == MEET:
            yield "meeting left out", k, without(k, k + 1)
            if row[LEFT]:
                yield "closing meeting left out", k, changed((k, LEFT, 0))
            continue
        if kind in (PART, INTO):
            count = SRC if kind == PART else SRC_AT
            yield "operand left out", head, without(k, k + 1, (head, count, int(rows[head, count]) - 1))
        else:
            head = k
            last = k + 1 + (row[SRC] + row[SRC_AT] if kind == SUM else 0)
            yield "row left out", k, without(k, last)
            for lag in {max(0, row[LAG] - 1), row[LAG] + 1} - {row[LAG]}:
                yield "lag off by one", k, changed(*((j, LAG, lag) for j in range(k, last)))
        if kind == SUM:
            yield "completion moved", k, changed((k, SRC_STEP, 1 - row[SRC_STEP]))
        yield from ((what, head, changed(*words)) for what, words in _elsewhere(table, bases, k, row))


def _elsewhere(
    table: Table, bases: Bases, k: int, row: list[int]
) -> Iterator[tuple[str, tuple[tuple[int, int, int], ...]]]:
    kind, n = row[KIND], table.size
    for word in {SUM: (), PART: (SRC,), INTO: (DST,)}.get(kind, (DST, SRC)):
        base = row[word]
        if base >= bases.stages:
            half, rank = divmod(base - bases.stages, n)
            yield "other half", ((k, word, bases.stage(rank, 1 - half)),)
            yield "other rank", ((k, word, bases.stage((rank + 1) % n, half)),)
        elif base > bases.temp:
            which, rank = divmod(base - bases.temp - 1, n)
            yield "other rank", ((k, word, bases.temp + 1 + which * n + (rank + 1) % n),)
        yield "a line off", ((k, word + 1, row[word + 1] + LINE),)
    if table.wide != table.itemsize:
        if kind in (PART, INTO):
            yield "other width", ((k, LEFT, 1 - row[LEFT]),)
        elif kind != SUM:
            for other in {COPY, WIDEN, NARROW} - {kind}:
                yield "other width", ((k, KIND, other),)


class Noted(Play):
    """A play that also notes what is written where."""

    def __init__(self, area: int, meeting: int) -> None:
        super().__init__(area, meeting)
        self.written: Counter[object] = Counter()

    def _write(self, target, total) -> None:  # type: ignore[no-untyped-def]
        values = tuple((p.begin, p.end, p.value, p.at) for p in total)
        self.written[target.region, target.at, target.nbytes, values] += 1
        super()._write(target, total)


def noted(tables: Sequence[Table], sizes: Sequence[int], area: int) -> Noted:
    play = Noted(area, 0)
    play.play(Call(tuple(tables), tuple(sizes)))
    return play


def reason(tables: Sequence[Table], spoilt: Sequence[Table], sizes: Sequence[int], area: int) -> str:
    """Why a mutant is as right as what it was made of; empty if there is no reason."""
    one, two = noted(tables, sizes, area), noted(spoilt, sizes, area)
    if not one.written:
        return "the call moves no bytes"
    return "it writes the same values to the same places" if one.written == two.written else ""


SPOILT = [
    ("all_reduce", "one_shot", "staged"), ("all_reduce", "two_phase", "mailbox"), ("all_reduce", "two_phase", "direct"),
    ("reduce", "star", "staged"), ("reduce", "two_phase", "mailbox"), ("reduce_scatter", "direct", "staged"),
    ("reduce_scatter", "direct", "direct"), ("all_gather", "direct", "staged"), ("all_gather", "direct", "direct"),
    ("all_to_all", "direct", "staged"), ("all_to_all", "direct", "direct"), ("broadcast", "star", "staged"),
    ("broadcast", "star", "direct"), ("broadcast", "star", "pushed"), ("gather", "star", "staged"),
    ("scatter", "star", "staged"), ("barrier", "one_shot", "staged"), ("all_reduce", "ring", "staged"),
    ("all_reduce", "ring", "direct"), ("all_reduce", "double_tree", "staged"),
    ("all_reduce", "halving_doubling", "staged"), ("all_gather", "ring", "staged"), ("all_to_all", "bruck", "staged"),
    ("all_reduce", "two_phase", "put"), ("all_reduce", "ring", "put"), ("all_to_all", "direct", "put"),
]  # fmt: skip


def three_pieces(
    collective: str, name: str, placement: str, n: int, itemsize: int = 1, wide: int = 1
) -> tuple[list[Table], list[int], int]:
    """Tables, sizes and area; the last piece is one element of four bytes short."""
    schedule = build(name, collective, n, chunks=n if collective == "broadcast" else 1)
    programs = lowered(schedule, placement)
    area, blocks = small_area(programs, itemsize, wide), num_blocks(schedule)
    part = bind(programs[0], [1 << 16] * blocks, area=area, itemsize=itemsize, wide=wide).part
    sizes = [0 if collective == "barrier" else 3 * part * schedule.collective.pieces - 4] * blocks
    return [bind(p, sizes, area=area, itemsize=itemsize, wide=wide) for p in programs], sizes, area


def spoilt(tables: list[Table]) -> Iterator[tuple[str, str, list[Table]]]:
    """Mutants of one rank's table, and of all ranks' alike, which is what a wrong lowering makes."""
    every = [list(mutants(table)) for table in tables]
    for rank, made in [(0, every[0]), (len(every) - 1, every[-1])]:
        for what, row, table in made:
            yield what, f"rank {rank}, row {row}", [*tables[:rank], table, *tables[rank + 1 :]]
    if len({tuple(what for what, _, _ in made) for made in every}) == 1:
        for alike in zip(*every, strict=True):
            yield alike[0][0], f"all ranks, row {alike[0][1]}", [table for _, _, table in alike]


@pytest.mark.parametrize("n", [2, 3])
def test_every_mutant_is_caught(n: int) -> None:
    made: Counter[str] = Counter()
    unexplained, reasons = [], Counter[str]()
    for case in [*SPOILT, ("all_reduce", "ring", "staged", 2, 4)]:
        collective, name, placement = case[:3]
        tables, sizes, area = three_pieces(collective, name, placement, n, *case[3:])
        assert prove(tables, sizes, area)
        for what, where, wrong in spoilt(tables):
            made[what] += 1
            proofs = (prove(wrong, sizes, area, first_meeting=parity) for parity in (0, 1))
            found = next((p for p in proofs if not p), None)
            if found is not None:
                assert {f.kind for f in found.findings} <= set(KINDS)
                continue
            why = reason(tables, wrong, sizes, area)
            reasons[why] += 1
            if not why:
                unexplained.append((what, where, case))
    assert not unexplained
    assert sum(made.values()) > 900
    assert sum(reasons.values()) < sum(made.values()) / 10


def test_every_finding_can_be_drawn() -> None:
    drawn: Counter[str] = Counter()
    for case in (*SPOILT[:3], *SPOILT[12:15], ("all_reduce", "ring", "staged", 2, 4)):
        collective, name, placement = case[:3]
        tables, sizes, area = three_pieces(collective, name, placement, 3, *case[3:])
        for _, _, wrong in list(spoilt(tables))[::3]:
            proof = prove(wrong, sizes, area)
            for k, finding in enumerate(proof.findings[:4]):
                picture = proof.draw(k)
                assert picture.count(" --> ") == len(finding.acts)
                assert f"^ {finding.kind}" in picture
                drawn[finding.kind] += 1
    assert drawn.keys() == set(KINDS) - {"input", "stale"}


def test_what_an_earlier_call_left_is_no_news() -> None:
    tables, sizes, area = three_pieces("all_gather", "direct", "staged", 2)
    staged = next(k for k, row in enumerate(tables[1].rows.tolist()) if row[DST] >= Bases(2).stages)
    wrong = replace(tables[1], rows=np.delete(tables[1].rows, staged, 0))
    right, spoilt_call = Call(tuple(tables), tuple(sizes)), Call((tables[0], wrong), tuple(sizes))
    proof = prove_calls([right, right, spoilt_call], area)
    assert {finding.kind for finding in proof.findings} == {"stale", "lost"}
    assert "which an earlier call has left there" in str(proof.findings[0])
    assert "call 0 of 3" in proof.draw() or "call 1 of 3" in proof.draw()


def closing_left_out() -> Proof:
    """A broadcast between tensors without its last meeting, on all ranks."""
    tables, sizes, area = three_pieces("broadcast", "star", "direct", 2)
    wrong = [next(made for what, _, made in mutants(table) if what == "closing meeting left out") for table in tables]
    return prove(wrong, sizes, area)


def test_a_counterexample_shows_the_rows_of_both_ranks() -> None:
    proof = closing_left_out()
    assert not proof.ok
    assert proof.draw().splitlines() == [
        "user: rank 1, epoch 3, row 0 (step 0 lag 1 COPY OUT[0] +0 (+512 a piece) <- PEER_IN[0] +0 (+512 a piece), "
        "512 B of 1532) reads bytes 1024-1532 of rank 0's input, which rank 0, after the call (epoch 3): the user's "
        "program writes before the same meeting",
        "",
        "rank 1, epoch 3: between meetings 2 and 3, call 0 of 2",
        "  --> i=3    step 0 lag 1  COPY   OUT[0] +0 (+512 a piece) <- PEER_IN[0] +0 (+512 a piece), 512 B of 1532",
        "             ^ user",
        "",
        "rank 0, epoch 3: between meetings 2 and 3, call 0 of 2",
        "      i=3    step 0 lag 1  COPY   OUT[0] +0 (+512 a piece) <- IN[0] +0 (+512 a piece), 512 B of 1532",
        "  --> the user's program writes its tensors, after the call",
        "      ^ here",
    ]
    with pytest.raises(ScheduleError, match="the user's program writes its tensors, after the call"):
        proof.raise_if_bad()
    with pytest.raises(UsageError, match="there is no finding 99"):
        proof.draw(99)


def test_a_rank_that_pushes_into_an_input_is_caught() -> None:
    tables, sizes, area = three_pieces("all_gather", "direct", "direct", 2)
    rows, bases = tables[0].rows.copy(), Bases(2)
    rows[rows[:, DST] == bases.output(), DST] = bases.input()
    proof = prove([replace(tables[0], rows=rows), tables[1]], sizes, area)
    assert "input" in {finding.kind for finding in proof.findings}


def test_findings_name_rank_epoch_row_and_bytes() -> None:
    tables, sizes, area = three_pieces("all_reduce", "one_shot", "staged", 2)
    meeting = next(k for what, k, _ in mutants(tables[1]) if what == "meeting left out")
    proof = prove([tables[0], replace(tables[1], rows=np.delete(tables[1].rows, meeting, 0))], sizes, area)
    assert str(proof).splitlines() == [
        "one_shot all_reduce, staged, over 2 ranks, 3 pieces: 3 findings",
        "place: rank 1, epoch 0, row 1 (step 0 lag 0 SUM 2 parts, 256 B of 764) adds elements of different places: "
        "[0, 256]",
        "meetings: rank 0, at the end of the call (epoch 0): waits for ever at meeting 0: rank 1 comes to 0 only",
        "race: rank 1, epoch 0, row 2 (+ STAGE[0].now +0) reads bytes 0-256 of rank 0's staging memory, even half, "
        "which rank 0, epoch 0, row 0 (step 0 lag 0 COPY STAGE[0].now +0 <- IN[0] +0 (+256 a piece), 256 B of 764) "
        "writes before the same meeting",
    ]


def test_verify_takes_programs_and_tables() -> None:
    programs = lowered(build("two_phase", "all_reduce", 3), "mailbox")
    assert str(verify(programs)) == (
        "two_phase all_reduce, mailbox, over 3 ranks, 3 pieces: holds, 4 meetings, sums in rank order"
    )
    tables, sizes, area = three_pieces("all_reduce", "ring", "staged", 3)
    assert str(verify(tables, sizes=sizes, area=area)) == (
        "ring all_reduce, staged, over 3 ranks, 3 pieces: holds, 12 meetings, sums in one order"
    )
    with pytest.raises(UsageError, match="sizes of all blocks and the area"):
        verify(tables)
    with pytest.raises(UsageError, match="sends messages"):
        verify(lowered(build("ring", "all_reduce", 3), "messages"))
    with pytest.raises(UsageError, match="ranks of one collective, by rank; got two_phase all_reduce rank 1 of 3"):
        verify(programs[1:])
    with pytest.raises(UsageError, match="has 1 blocks, got 3 sizes"):
        verify(tables, sizes=[4] * 3, area=area)


def test_other_orders_on_other_ranks_are_told() -> None:
    """Two ranks that each add the other's part to their own: right, but not the same bits."""
    tables, sizes, area = three_pieces("all_reduce", "one_shot", "staged", 3)
    rows = tables[2].rows.copy()
    parts = np.flatnonzero(rows[:, KIND] == PART)
    rows[parts] = rows[parts[::-1]]
    proof = prove([*tables[:2], replace(tables[2], rows=rows)], sizes, area)
    assert proof
    assert (proof.ordered, proof.rank_order) == (False, False)
    assert str(proof).endswith("sums in other orders on other ranks")
