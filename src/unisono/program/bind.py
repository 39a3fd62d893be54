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
that a piece takes one meeting less than the program has. `staged` programs of several pieces are *overlapped* over
hosts (slots.py): every part of the program works on another piece, one meeting for all, and an iteration does that for
`WINDOWS` pieces in a row, each with a window of the staging memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.program.bases import Bases
from unisono.program.lower import Unfit
from unisono.program.program import Place, Program, Row
from unisono.program.slots import LATE, WINDOWS, Overlap, StageWrite

__all__ = [
    "COPY", "DST", "DST_AT", "DST_STEP", "INTO", "KIND", "LAG", "LEFT", "LINE", "MEET", "MOST", "NARROW", "PART",
    "SHRINK", "SRC", "SRC_AT", "SRC_STEP", "STEP", "SUM", "WIDEN", "WORDS", "Bases", "Table", "bind",
]  # fmt: skip

KIND, DST, DST_AT, DST_STEP, SRC, SRC_AT, SRC_STEP, LEFT, SHRINK, MOST, LAG, STEP = range(12)
WORDS = 12
COPY, SUM, PART, INTO, MEET, WIDEN, NARROW = range(7)
LINE = 64
_NAMES = ("COPY", "SUM", "PART", "INTO", "MEET", "WIDEN", "NARROW")
_FOLDED = ("mailbox", "direct", "pushed")
_OVERLAPPED = 3  # meetings of overlapping pieces that are worth one between pieces that do not


@dataclass(frozen=True, eq=False)
class Table:
    """The words of a bound program.

    ``part``: bytes of a chunk, at most, that go in one piece; ``temp_nbytes``: of temporary memory; ``itemsize`` and
    ``wide``: bytes of an element in the user's memory, and in staging and temporary memory. ``stage_nbytes``: how far a
    half of the staging memory of any rank is used, the same on all ranks. ``stage_writes``: what goes to staging
    memory, in the order of the rows, for those who send it on to other hosts. ``late``: meetings after the
    one it is sent at that those hosts may do without it.
    """

    program: Program
    rows: NDArray[np.int64]
    pieces: int
    part: int
    temp_nbytes: int
    itemsize: int
    wide: int
    stage_nbytes: int = 0
    stage_writes: tuple[StageWrite, ...] = ()
    late: int = 0

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
        head = (
            f"{self.program.name}, {self.program.placement}: rank {self.program.rank} of {self.size}, {self.pieces} "
            f"{f'x {WINDOWS} ' * bool(self.late)}pieces, {self.pieces + self.lags} iterations, {self.meetings} "
            f"meetings, {len(self.rows)} rows" + f", what crosses is due {self.late} meetings later" * bool(self.late)
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
    overlap: Overlap | None = None,
) -> Table:
    """The table of a program for blocks of ``nbytes``; for placements over shared memory.

    ``area``: bytes of a rank's staging memory in a half, or, of a direct program, that a rank moves between two
    meetings. ``cap``: bytes of a chunk, at most, that go in one piece. ``wide``: bytes of an accumulator, if the
    program keeps partial sums in another dtype than the user's, whose elements have ``itemsize`` bytes. ``listed``:
    whether input and output are a tensor per block. ``uneven``: the sizes of other ranks' blocks may change, and what
    this rank does before the first meeting must not depend on them. ``crosses``: whether `Table.stage_writes` is
    wanted. ``overlap``: how pieces overlap where there are several. Raises `Unfit` if a slot would have no room.
    """
    if not program.partial:
        wide = itemsize
    elif wide not in (0, itemsize) and program.placement in ("direct", "pushed"):
        raise Unfit(f"{program.name} would keep partial sums in the users' tensors, whose dtype rounds them: staged")
    made = _Binding(program, nbytes, area, cap, itemsize, wide or itemsize, listed, uneven, overlap)
    table = made.table()
    return replace(table, stage_writes=tuple(made.stage_writes())) if crosses else table


class _Binding:
    """One table in the making."""

    def __init__(
        self, program: Program, nbytes: Sequence[int], area: int, cap: int, itemsize: int, wide: int,
        listed: tuple[bool, bool], uneven: bool, overlap: Overlap | None,
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
        self._first = [sum(program.slots[:step]) for step in range(len(program.slots))]
        self._offsets: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.overlap, self._window = None, area // (WINDOWS // 2) // LINE * LINE
        less = min(limit, self._window // overlap.slots * itemsize // wide // LINE * LINE) if overlap else 0
        if overlap is None or less < LINE:
            self._cut(limit)
            return
        self._cut(less if uneven else limit)
        most = self.pieces * len(program.slots) * _OVERLAPPED
        if self.pieces > 1:
            self._cut(less)
            if uneven or self.pieces + overlap.lags[-1] <= most:
                self.overlap = overlap
            else:
                self._cut(limit)

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

    def place(self, at: Place, lag: int, turn: int) -> list[int]:
        """Base, offset, and how far it moves from piece to piece."""
        space, index, rank = at.space, at.index, at.rank if at.rank >= 0 else self.rank
        if space == "temp":
            return [self.bases.temp, index * self._slot(), 0]
        if space == "stage":
            return self._staged(index, rank, lag, turn)
        block, start = self._offset(space, index, rank)
        start += self._later(lag, turn) * self.step
        if rank != self.rank:
            return [(self.bases.peer_input if space == "in" else self.bases.peer_output)(rank), start, self._stride]
        return [(self.bases.input if space == "in" else self.bases.output)(block), start, self._stride]

    def _staged(self, slot: int, rank: int, lag: int, turn: int) -> list[int]:
        step = max(step for step, first in enumerate(self._first) if first <= slot)
        if self.overlap is None:
            other = lag & 1 if self.folded else step & 1
            return [self.bases.stage(rank, other), (slot - self._first[step]) * self._slot(), 0]
        met = turn - (lag - self.overlap.lags[step])  # the meeting at which it is staged, from the iteration's first on
        at = (met // 2 % (WINDOWS // 2)) * self._window + self.overlap.places[rank, slot] * self._slot()
        return [self.bases.stage(rank, met & 1), at, 0]

    @property
    def _stride(self) -> int:
        """How far a place moves from iteration to iteration."""
        return self.step if self.overlap is None else WINDOWS * self.step

    def _later(self, lag: int, turn: int) -> int:
        """How many pieces the rows of a turn are ahead of the first piece of an iteration, `lag` / `WINDOWS` ago."""
        return 0 if self.overlap is None else (turn - lag) % WINDOWS

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
        for row, lag, beyond, turn in self._body():
            rows += self._words(row, lag, beyond, turn)
        rows = _merged(rows, self.pieces == 1 and not self.uneven)
        words = np.array(rows, np.int64).reshape(-1, WORDS)
        temps, late = self.program.temps * self._slot(), LATE - 1 if self.overlap is not None else 0
        used, widths = self._stage_nbytes(), (self.itemsize, self.wide)
        return Table(self.program, words, self._iterations, self.part, temps, *widths, used, late=late)

    def _stage_nbytes(self) -> int:
        """See `Table`."""
        longest = min(self.part, max([0, *self.lefts])) * self.wide // self.itemsize
        return (max([1, *self.program.slots]) - 1) * self._slot() + longest

    @property
    def _iterations(self) -> int:
        return self.pieces if self.overlap is None else -(-self.pieces // WINDOWS)

    def _body(self) -> list[tuple[Row, int, int, int]]:
        """Rows with their lags, the iterations beyond the number of pieces that a meeting takes place in, and turns."""
        if not self.folded and self.overlap is None:
            return [(row, 0, 0, 0) for row in self.program.rows]
        parts: list[list[Row]] = [[]]
        meets: list[Row] = []
        for row in self.program.rows:
            if row.kind == "meet":
                meets.append(row)
                parts.append([])
            else:
                parts[-1].append(row)
        body: list[tuple[Row, int, int, int]] = []
        if self.overlap is not None:
            meetings = self.pieces + self.overlap.lags[-1] - 1
            for turn in range(WINDOWS):
                for part, lag in zip(parts, self.overlap.lags, strict=True):
                    body += [(row, lag, 0, turn) for row in part]
                body.append((meets[0], 0, -(-(meetings - turn) // WINDOWS) - self._iterations, turn))
            return body
        last = len(meets) - 1  # the last meeting of a piece is the first of the next one
        body = [(row, 0, 0, 0) for row in parts[0]] + [(row, 1, 0, 0) for row in parts[last]]
        body += [(meets[0], 0, 1, 0), *((row, 1, 0, 0) for row in parts[last + 1])]
        for number in range(1, last):
            body += [(row, 0, 0, 0) for row in parts[number]] + [(meets[number], 0, 0, 0)]
        return body

    def stage_writes(self) -> Iterator[StageWrite]:
        """The writes of the body to staging memory."""
        meets = 0
        for row, lag, _, turn in self._body():
            meets += row.kind == "meet"
            for at in row.to:
                if at.space == "stage":
                    rank = at.rank if at.rank >= 0 else self.rank
                    base, offset, _ = self.place(at, lag, turn)
                    left, shrink, most = (x * self.wide // self.itemsize for x in self._much(row, lag, turn))
                    other = (base - self.bases.stages) // self.c.world_size
                    yield StageWrite(meets, self._lag(lag, turn), rank, at.index, other, offset, left, shrink, most)

    def _lag(self, lag: int, turn: int) -> int:
        """In iterations."""
        return lag if self.overlap is None else -((turn - lag) // WINDOWS)

    def _much(self, row: Row, lag: int, turn: int) -> tuple[int, int, int]:
        """Bytes of a row's chunk that are left in an iteration's first piece, as in the words LEFT, SHRINK, MOST."""
        return self.lefts[row.chunk] - self._later(lag, turn) * self.step, self._stride, self.part

    def _words(self, row: Row, lag: int, beyond: int, turn: int) -> list[list[int]]:
        if row.kind == "meet":
            return [[MEET, 0, 0, 0, 0, 0, 0, beyond, 0, 0, 0, row.step]]
        left, shrink, most = self._much(row, lag, turn)
        to = [self.place(at, lag, turn) for at in row.to]
        parts = [self.place(at, lag, turn) for at in row.parts]
        end = [self._lag(lag, turn), row.step]
        if row.kind == "sum":
            words = [[SUM, 0, 0, 0, len(parts), len(to), int(row.complete), left, shrink, most, *end]]
            for at, where in zip(row.parts, parts, strict=True):
                words.append([PART, 0, 0, 0, *where, int(self._is_wide(at)), 0, 0, *end])
            for at, where in zip(row.to, to, strict=True):
                words.append([INTO, *where, 0, 0, 0, int(self._is_wide(at)), 0, 0, *end])
            return words
        widths = self._is_wide(row.to[0]), self._is_wide(row.parts[0])
        kind = {(True, False): WIDEN, (False, True): NARROW}.get(widths, COPY)
        if widths == (True, True):
            left, shrink, most = (x * self.wide // self.itemsize for x in (left, shrink, most))
        return [[kind, *to[0], *parts[0], left, shrink, most, *end]]


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
