"""A program bound to sizes: the words that an interpreter over shared memory walks.

Rows are a loop body that runs ``pieces + lags`` times; in iteration i a row works on piece i - LAG, and rests where
there is no such piece. Twelve int64 words a row:

    kind     dst, dst_at, dst_step       src, src_at, src_step         what
    COPY     where to                    where from                    bytes of this piece
    WIDEN    where to, accumulators      where from, user's dtype      the same elements, converted
    NARROW   where to, user's dtype      where from, accumulators      the same elements, converted
    SUM      -                           parts, targets, complete      combines the PART rows that follow, in order,
                                                                       into the INTO rows that follow those
    PART     -                           one operand                   LEFT is 1 if it holds accumulators
    INTO     one place for the sum       -                             LEFT is 1 if it holds accumulators
    MEET     -                           -                             `left`: iterations beyond `pieces` that have it

A place in piece p is ``base[dst] + dst_at + p * dst_step``; its length is ``min(most, left - p * shrink)`` bytes, of
the user's dtype where two widths meet, and none if that is negative. So a last, shorter piece needs no row of its own.

Bases are indices into a table of addresses (`Bases`). A rank's staging memory has two halves, one per parity of
meetings; a row names them *relative to its iteration*: the half of the iteration's first meeting, or the other one. The
table has the areas three times running (even, odd, even), so that the parity of a meeting is one addition and a table,
holding no meeting number, serves every call of its kind.

`mailbox` and `direct` programs are *folded*: piece p is combined in the iteration after the one it was staged in, so
that a piece takes one meeting less than the program has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.program.lower import Unfit
from unisono.program.program import Place, Program, Row

__all__ = [
    "COPY", "DST", "DST_AT", "DST_STEP", "INTO", "KIND", "LAG", "LEFT", "LINE", "MEET", "MOST", "NARROW", "PART",
    "SHRINK", "SRC", "SRC_AT", "SRC_STEP", "STEP", "SUM", "WIDEN", "WORDS", "Bases", "StageWrite", "Table", "bind",
]  # fmt: skip

KIND, DST, DST_AT, DST_STEP, SRC, SRC_AT, SRC_STEP, LEFT, SHRINK, MOST, LAG, STEP = range(12)
WORDS = 12
COPY, SUM, PART, INTO, MEET, WIDEN, NARROW = range(7)
LINE = 64
_NAMES = ("COPY", "SUM", "PART", "INTO", "MEET", "WIDEN", "NARROW")
_FOLDED = ("mailbox", "direct", "pushed")


@dataclass(frozen=True)
class Bases:
    """Indices into the table of base addresses of a rank among ``size``."""

    size: int

    def input(self, block: int = 0) -> int:
        """The user's input, or one tensor of several."""
        return block

    def output(self, block: int = 0) -> int:
        """The user's output, or one tensor of several."""
        return self.size + block

    @property
    def temp(self) -> int:
        """Memory of this rank alone."""
        return 2 * self.size

    def peer_input(self, rank: int) -> int:
        """The input of ``rank``, where it is mapped."""
        return 2 * self.size + 1 + rank

    def peer_output(self, rank: int) -> int:
        """The output of ``rank``, where it is mapped."""
        return 3 * self.size + 1 + rank

    @property
    def stages(self) -> int:
        """From here on the parity of the iteration counts."""
        return 4 * self.size + 1

    def stage(self, rank: int, other: int) -> int:
        """The staging memory of ``rank``: the half of the iteration's first meeting (``other`` 0), or the other."""
        return self.stages + other * self.size + rank

    @property
    def length(self) -> int:
        """Words of the table."""
        return 7 * self.size + 1

    def name(self, index: int) -> str:
        """As a table's text has it."""
        n = self.size
        if index >= self.stages:
            other, rank = divmod(index - self.stages, n)
            return f"STAGE[{rank}].{('now', 'other')[other & 1]}"
        if index == self.temp:
            return "TEMP"
        kind, at = divmod(index if index < 2 * n else index - 1, n)
        return f"{('IN', 'OUT', 'PEER_IN', 'PEER_OUT')[kind]}[{at}]"


@dataclass(frozen=True, slots=True)
class StageWrite:
    """One row's write to staging memory: slot ``index`` of ``rank``, after ``meets`` meetings of the body.

    In iteration i it is piece i - ``lag``, at offset ``at`` of the half that `Bases.stage` names ``other``; its length
    is ``min(most, left - piece * shrink)`` bytes, none if that is negative.
    """

    meets: int
    lag: int
    rank: int
    index: int
    other: int
    at: int
    left: int
    shrink: int
    most: int


@dataclass(frozen=True, eq=False)
class Table:
    """The words of a bound program.

    ``part``: bytes of a chunk, at most, that go in one piece; ``temp_nbytes``: of temporary memory; ``itemsize`` and
    ``wide``: bytes of an element in the user's memory, and in staging and temporary memory. ``stage_writes``: what goes
    to staging memory, in the order of the rows, for those who send it on to other hosts.
    """

    program: Program
    rows: NDArray[np.int64]
    pieces: int
    part: int
    temp_nbytes: int
    itemsize: int
    wide: int
    stage_writes: tuple[StageWrite, ...] = ()

    @property
    def size(self) -> int:
        """Ranks."""
        return self.program.collective.world_size

    @cached_property
    def meets(self) -> int:
        """Meetings of a full iteration."""
        return int((self.rows[:, KIND] == MEET).sum())

    @cached_property
    def lags(self) -> int:
        """Iterations beyond the number of pieces."""
        return max((row[LEFT] if row[KIND] == MEET else row[LAG] for row in self.rows.tolist()), default=0)

    @property
    def meetings(self) -> int:
        """Meetings of a call."""
        return int((self.pieces + self.rows[self.rows[:, KIND] == MEET][:, LEFT]).sum())

    def to_text(self) -> str:
        """A line per row."""
        n = self.size
        head = (
            f"{self.program.name}, {self.program.placement}: rank {self.program.rank} of {n}, {self.pieces} pieces, "
            f"{self.pieces + self.lags} iterations, {self.meetings} meetings, {len(self.rows)} rows"
        )
        return "\n".join([head, *(self._line(row) for row in self.rows.tolist())])

    __str__ = to_text

    def _line(self, row: list[int]) -> str:
        names = Bases(self.size)

        def place(base: int, at: int, step: int) -> str:
            return f"{names.name(base)} +{at}" + (f" (+{step} a piece)" if step else "")

        kind = row[KIND]
        much = f"{row[MOST]} B of {row[LEFT]}" if row[SHRINK] else f"{min(row[LEFT], row[MOST])} B"
        lead = f"  step {row[STEP]} lag {row[LAG]}  {_NAMES[kind]:6}"
        wide = ", accumulators" if row[LEFT] else ""
        if kind == SUM:
            return f"{lead} {row[SRC]} parts, {much}" + ("" if row[SRC_STEP] else ", partial")
        if kind == PART:
            return f"{'':16} + {place(*row[SRC : SRC_STEP + 1])}{wide}"
        if kind == INTO:
            return f"{'':16} > {place(*row[DST : DST_STEP + 1])}{wide}"
        if kind == MEET:
            return lead + (f" and in {row[LEFT]} iterations more" if row[LEFT] else "")
        return f"{lead} {place(*row[DST : DST_STEP + 1])} <- {place(*row[SRC : SRC_STEP + 1])}, {much}"


def bind(
    program: Program,
    nbytes: Sequence[int],
    *,
    area: int,
    cap: int = 1 << 40,
    itemsize: int = 1,
    wide: int = 0,
    listed: tuple[bool, bool] = (False, False),
    uneven: bool = False,
    crosses: bool = False,
) -> Table:
    """The table of a program for blocks of ``nbytes``; for placements over shared memory.

    ``area``: bytes of a rank's staging memory in a half, or, of a direct program, that a rank moves between two
    meetings. ``cap``: bytes of a chunk, at most, that go in one piece. ``wide``: bytes of an accumulator, if the
    program keeps partial sums in another dtype than the user's, whose elements have ``itemsize`` bytes. ``listed``:
    whether input and output are a tensor per block. ``uneven``: the sizes of other ranks' blocks may change, and what
    this rank does before the first meeting must not depend on them. ``crosses``: whether `Table.stage_writes` is
    wanted. Raises `Unfit` if a slot would have no room.
    """
    if not program.partial:
        wide = itemsize
    elif wide not in (0, itemsize) and program.placement in ("direct", "pushed"):
        raise Unfit(f"{program.name} would keep partial sums in the users' tensors, whose dtype rounds them: staged")
    made = _Binding(program, nbytes, area, cap, itemsize, wide or itemsize, listed, uneven)
    table = made.table()
    return replace(table, stage_writes=tuple(made.stage_writes())) if crosses else table


class _Binding:
    """One table in the making."""

    def __init__(
        self, program: Program, nbytes: Sequence[int], area: int, cap: int, itemsize: int, wide: int,
        listed: tuple[bool, bool], uneven: bool,
    ) -> None:  # fmt: skip
        self.program, self.c, self.rank = program, program.collective, program.rank
        self.sizes, self.listed, self.uneven = list(nbytes), listed, uneven
        self.itemsize, self.wide = itemsize, wide
        self.bases = Bases(self.c.world_size)
        self.folded = program.placement in _FOLDED
        slots = max((*program.slots, 1)) if not self.folded or program.slots else self.c.world_size
        limit = min(cap, area // slots * itemsize // wide) // LINE * LINE
        if limit < LINE:
            raise Unfit(f"{program.name}: {slots} chunks do not fit {area} bytes of staging memory; use fewer chunks")
        self._cut(limit)
        self._first = [sum(program.slots[:step]) for step in range(len(program.slots))]
        self._offsets: dict[tuple[str, int, int], tuple[int, int]] = {}

    def _cut(self, limit: int) -> None:
        """Pieces: one window of the tensor after the other where nobody owns a chunk, else of every chunk."""
        per = self.c.pieces
        self.windows = per == self.c.num_chunks
        if self.windows:
            total = self.sizes[0]
            self.pieces = max(1, -(-total // (per * limit)))
            self.part = max(LINE, min(limit, _up(-(-total // (self.pieces * per)))))
            self.starts = [chunk * self.part for chunk in range(per)]
            self.lefts = [total - start for start in self.starts]
            self.step = per * self.part
            return
        each = [_up(-(-size // per)) if per > 1 else size for size in self.sizes]
        self.starts = [k * each[b] for b in range(len(self.sizes)) for k in range(per)]
        self.lefts = [min(each[b], self.sizes[b] - k * each[b]) for b in range(len(self.sizes)) for k in range(per)]
        longest = max([0, *self.lefts])
        self.pieces = max(1, -(-longest // limit))
        self.part = limit if self.uneven else max(LINE, min(limit, _up(-(-longest // self.pieces))))
        if self.pieces == 1 and not self.uneven:
            self.part = longest or LINE  # chunks side by side, so that neighbours become one row
        self.step = self.part

    # Places

    def place(self, at: Place, lagging: bool) -> list[int]:
        """Base, offset, and how far it moves from piece to piece."""
        space, index, rank = at.space, at.index, at.rank if at.rank >= 0 else self.rank
        if space == "temp":
            return [self.bases.temp, index * self._slot(), 0]
        if space == "stage":
            step = max(s for s, first in enumerate(self._first) if first <= index)
            other = int(lagging) if self.folded else step & 1
            return [self.bases.stage(rank, other), (index - self._first[step]) * self._slot(), 0]
        block, start = self._offset(space, index, rank)
        if rank != self.rank:
            return [(self.bases.peer_input if space == "in" else self.bases.peer_output)(rank), start, self.step]
        return [(self.bases.input if space == "in" else self.bases.output)(block), start, self.step]

    def _slot(self) -> int:
        return self.part * self.wide // self.itemsize

    def _offset(self, space: str, chunk: int, rank: int) -> tuple[int, int]:
        """Of a chunk of a rank's input or output: its tensor, and its first byte there."""
        found = self._offsets.get((space, chunk, rank))
        if found is None:
            blocks = (self.program.blocks_in if space == "in" else self.program.blocks_out)[rank]
            block = chunk // self.c.pieces
            number = blocks.index(block)
            if self.listed[space == "out"] and len(blocks) > 1 and rank == self.rank:
                found = (number, self.starts[chunk])
            else:
                found = (0, sum(self.sizes[b] for b in blocks[:number]) + self.starts[chunk])
            self._offsets[space, chunk, rank] = found
        return found

    def _is_wide(self, at: Place) -> bool:
        return self.wide != self.itemsize and at.space in ("stage", "temp")

    # Rows

    def table(self) -> Table:
        """The rows, in the order of the body."""
        rows: list[list[int]] = []
        for row, lag, beyond in self._body():
            rows += self._words(row, lag, beyond)
        rows = _merged(rows, self.pieces == 1 and not self.uneven)
        words = np.array(rows, np.int64).reshape(-1, WORDS)
        temps = self.program.temps * self._slot()
        return Table(self.program, words, self.pieces, self.part, temps, self.itemsize, self.wide)

    def _body(self) -> list[tuple[Row, int, int]]:
        """Rows with their lags, and the iterations beyond the number of pieces that a meeting takes place in."""
        if not self.folded:
            return [(row, 0, 0) for row in self.program.rows]
        segments: list[list[Row]] = [[]]
        meets: list[Row] = []
        for row in self.program.rows:
            if row.kind == "meet":
                meets.append(row)
                segments.append([])
            else:
                segments[-1].append(row)
        last = len(meets) - 1  # the last meeting of a piece is the first of the next one
        body = [(row, 0, 0) for row in segments[0]] + [(row, 1, 0) for row in segments[last]]
        body += [(meets[0], 0, 1), *((row, 1, 0) for row in segments[last + 1])]
        for number in range(1, last):
            body += [(row, 0, 0) for row in segments[number]] + [(meets[number], 0, 0)]
        return body

    def stage_writes(self) -> Iterator[StageWrite]:
        """The writes of the body to staging memory."""
        meets = 0
        for row, lag, _ in self._body():
            meets += row.kind == "meet"
            for at in row.to:
                if at.space == "stage":
                    rank = at.rank if at.rank >= 0 else self.rank
                    base, offset, _ = self.place(at, lag > 0)
                    sizes = (self.lefts[row.chunk], self.step, self.part)
                    left, shrink, most = (x * self.wide // self.itemsize for x in sizes)
                    other = (base - self.bases.stages) // self.c.world_size
                    yield StageWrite(meets, lag, rank, at.index, other, offset, left, shrink, most)

    def _words(self, row: Row, lag: int, beyond: int) -> list[list[int]]:
        if row.kind == "meet":
            return [[MEET, 0, 0, 0, 0, 0, 0, beyond, 0, 0, 0, row.step]]
        left, shrink, most = self.lefts[row.chunk], self.step, self.part
        to = [self.place(at, lag > 0) for at in row.to]
        parts = [self.place(at, lag > 0) for at in row.parts]
        if row.kind == "sum":
            words = [[SUM, 0, 0, 0, len(parts), len(to), int(row.complete), left, shrink, most, lag, row.step]]
            for at, where in zip(row.parts, parts, strict=True):
                words.append([PART, 0, 0, 0, *where, int(self._is_wide(at)), 0, 0, lag, row.step])
            for at, where in zip(row.to, to, strict=True):
                words.append([INTO, *where, 0, 0, 0, int(self._is_wide(at)), 0, 0, lag, row.step])
            return words
        widths = self._is_wide(row.to[0]), self._is_wide(row.parts[0])
        kind = {(True, False): WIDEN, (False, True): NARROW}.get(widths, COPY)
        if widths == (True, True):
            left, shrink, most = (x * self.wide // self.itemsize for x in (left, shrink, most))
        return [[kind, *to[0], *parts[0], left, shrink, most, lag, row.step]]


def _up(nbytes: int, unit: int = LINE) -> int:
    return -(-nbytes // unit) * unit


def _merged(rows: list[list[int]], whole: bool) -> list[list[int]]:
    """Copies of neighbours as one row, where the pieces allow it; ``whole``: there is one piece."""
    found: list[list[int]] = []
    for row in rows:
        if whole and row[KIND] in (COPY, SUM, WIDEN, NARROW):
            length = max(0, min(row[LEFT], row[MOST]))
            if length == 0 and row[KIND] != SUM:
                continue
            row = [*row[:LEFT], length, 0, length, *row[LAG:]]
        if found and _continues(found[-1], row, whole):
            a = found[-1]
            left = a[LEFT] + row[LEFT] if whole else a[LEFT]
            found[-1] = [*a[:LEFT], left, a[SHRINK], a[MOST] + row[MOST], *a[LAG:]]
        else:
            found.append(row)
    return found


def _continues(a: list[int], b: list[int], whole: bool) -> bool:
    """Whether copy ``b`` goes on where copy ``a`` ends, at either end, in every piece."""
    if not a[KIND] == b[KIND] == COPY:
        return False
    if any(a[k] != b[k] for k in (DST, DST_STEP, SRC, SRC_STEP, SHRINK, LAG, STEP)):
        return False
    beside = b[DST_AT] - a[DST_AT] == b[SRC_AT] - a[SRC_AT] == a[MOST]
    return beside and (whole or a[LEFT] - b[LEFT] == a[MOST])
