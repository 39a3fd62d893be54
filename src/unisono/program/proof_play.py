"""Calls played by the tables of all ranks, for the proof: every access noted by epoch, every value followed.

`Play` walks rows just as the interpreters do: the same pieces, lags, halves and meetings.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.program.bind import (
    COPY,
    DST,
    KIND,
    LAG,
    LEFT,
    MEET,
    MOST,
    NARROW,
    SHRINK,
    SRC,
    SRC_AT,
    SRC_STEP,
    SUM,
    WIDEN,
    Table,
)
from unisono.program.proof_memory import Act, Memory, Part, Region, Segment, Spot, Tensors, Tree, Value, refined

__all__ = ["AFTER", "BEFORE", "END", "Access", "Call", "Finding", "Play"]

BEFORE, AFTER, END = -1, -2, -3
"""Rows of what is no row: the program around a call before it, after it, and the end of the call."""


@dataclass(frozen=True)
class Finding:
    """One defect: its kind (see proof.py), the rank and the row of its table that show it, in words.

    ``epoch``: the meeting before which that is; ``row``: -1 or less where it is no row; ``acts``: the rows to look at.
    """

    kind: str
    rank: int
    row: int
    step: int
    epoch: int
    text: str
    acts: tuple[Act, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a collective: the tables of all ranks, bytes of every block, and where its tensors are."""

    tables: tuple[Table, ...]
    sizes: tuple[int, ...]
    in_place: bool = False
    listed: tuple[bool, bool] = (False, False)

    def line(self, act: Act, row: int | None = None) -> str:
        """A row as the text of its table has it."""
        return self.tables[act.rank].to_text().splitlines()[1 + (act.operand if row is None else row)]


class Access(NamedTuple):
    """Bytes that an act touches."""

    begin: int
    end: int
    writes: bool
    act: Act


class _Operand(NamedTuple):
    """The place of an operand in a piece: ``nbytes`` from byte ``at``, as accumulators or not."""

    spot: Spot
    region: Region
    at: int
    nbytes: int
    wide: bool
    act: Act


class Play:
    """Calls in a row, over areas of ``area`` bytes, from meeting ``meeting`` on."""

    def __init__(self, area: int, meeting: int) -> None:
        self.area, self.meeting = area, meeting
        self.memory: dict[Region, Memory] = {}
        self.accesses: dict[int, dict[Region, list[Access]]] = {}
        self.acts: dict[tuple[int, int], list[Act]] = {}  # (epoch, rank)
        self.findings: dict[tuple[object, ...], Finding] = {}
        self.results: list[tuple[int, int, Tree]] = []  # (begin, end) in the vector, of all ranks, of the last call
        self.calls: list[Call] = []

    # Calls

    def play(self, call: Call) -> None:
        """One call."""
        self.calls.append(call)
        self.number, self.call = len(self.calls) - 1, call
        self.tensors = Tensors(call.tables, call.sizes, self.area, call.in_place, call.listed)
        self.n = self.tensors.c.world_size
        self.every = (1 << self.n) - 1
        self.unit = call.tables[0].itemsize, call.tables[0].wide
        self.epoch = first = self.meeting
        for rank in range(self.n):
            self._around(rank, BEFORE)
        walks = [self._walk(table) for table in call.tables]
        while True:
            met = [next(walk, False) for walk in walks]
            if not all(met):
                break
            self.epoch += 1
        self.meeting = self.epoch
        if any(met) or self.epoch == first:
            self._unequal(met, self.epoch - first)
            return
        for rank in range(self.n):
            self._end(rank)
        for rank in range(self.n):
            self._around(rank, AFTER)

    def find(self, kind: str, text: str, *acts: Act) -> None:
        """Notes a finding, once for the same rows."""
        act = acts[0]
        key = (kind, *((a.rank, a.row, a.operand) for a in acts if a.row >= END))
        if key in self.findings:
            return
        call = self.calls[act.call]
        step = int(call.tables[act.rank].rows[act.row][-1]) if act.row >= 0 else -1
        row = act.operand if act.row >= 0 else act.row
        self.findings[key] = Finding(kind, act.rank, row, step, act.epoch, f"{self.words(act)} {text}", acts)

    def words(self, act: Act) -> str:
        """The act in words: rank, row and time."""
        if act.row in (BEFORE, AFTER):
            when = "before" if act.row == BEFORE else "after"
            return f"rank {act.rank}, {when} the call (epoch {act.epoch}): the user's program"
        if act.row == END:
            return f"rank {act.rank}, at the end of the call (epoch {act.epoch}):"
        row = " ".join(self.calls[act.call].line(act).split())
        return f"rank {act.rank}, epoch {act.epoch}, row {act.operand} ({row})"

    def _unequal(self, met: Sequence[bool], times: int) -> None:
        waits = [rank for rank, more in enumerate(met) if more]
        over = [rank for rank, more in enumerate(met) if not more]
        acts = [Act(self.number, r, self.epoch, 0, END, END) for r in (*waits[:1], *over[:1])]
        if not waits:
            self.find("meetings", "no rank has met another, so that nothing orders them", *acts)
            return
        self.find("meetings", f"waits for ever at meeting {self.epoch}: rank {over[0]} comes to {times} only", *acts)

    def _around(self, rank: int, when: int) -> None:
        """The program around the call writes its tensors, before and after."""
        act = Act(self.number, rank, self.epoch, 0, when, when)
        for side in ("out", "in"):
            region, at = self.tensors.region(rank, side)
            for block in self.tensors.blocks[side][rank]:
                end = at + self.tensors.sizes[block]
                if at < end:
                    self._note(region, Access(at, end, True, act))
                    given = Value(rank, 1 << rank, self.number) if side == "in" and when == BEFORE else None
                    self._memory(region).write(
                        at, end, [Segment(at, end, given, self.tensors.starts[block], False, act)]
                    )
                at = end

    def _memory(self, region: Region) -> Memory:
        found = self.memory.get(region)
        if found is None:
            found = self.memory[region] = Memory(self.unit)
        return found

    def _note(self, region: Region, access: Access) -> None:
        self.accesses.setdefault(access.act.epoch, {}).setdefault(region, []).append(access)

    # Rows

    def _walk(self, table: Table) -> Iterator[bool]:
        """Plays up to each meeting."""
        rank, first, rows = table.program.rank, self.meeting, table.rows.tolist()
        meets, pieces = table.meets, table.pieces
        for i in range(pieces + table.lags):
            flip, k = (first + i * meets) & 1, 0
            while k < len(rows):
                row = rows[k]
                if row[KIND] == MEET:
                    if i < pieces + row[LEFT]:
                        yield True
                    k += 1
                    continue
                operands = rows[k + 1 : k + 1 + row[SRC] + row[SRC_AT]] if row[KIND] == SUM else []
                piece = i - row[LAG]
                nbytes = min(row[MOST], row[LEFT] - piece * row[SHRINK])
                if 0 <= piece < pieces and nbytes > 0:
                    self._do(Act(self.number, rank, self.epoch, i, k, k), row, operands, piece, nbytes, flip)
                k += 1 + len(operands)

    def _do(self, act: Act, row: list[int], operands: list[list[int]], piece: int, nbytes: int, flip: int) -> None:
        kind, (narrow, wide) = row[KIND], self.unit

        def place(k: int, of: list[int], word: int, accumulators: bool) -> _Operand:
            spot = self.tensors.spot(act.rank, of[word])
            region = spot.region
            if flip and region.space == "stage":
                region = Region(region.rank, "stage", region.parity ^ 1)
            at = spot.first + of[word + 1] + piece * of[word + 2]
            much = nbytes * wide // narrow if accumulators else nbytes
            return _Operand(spot, region, at, much, accumulators, Act(*act[:-1], act.row + k))

        if kind == SUM:
            sources = [place(1 + j, of, SRC, bool(of[LEFT])) for j, of in enumerate(operands[: row[SRC]])]
            targets = [place(1 + j, of, DST, bool(of[LEFT])) for j, of in enumerate(operands) if j >= row[SRC]]
        else:
            sources, targets = [place(0, row, SRC, kind == NARROW)], [place(0, row, DST, kind == WIDEN)]
            if kind == COPY and sources[0].spot.accumulators:
                nbytes = nbytes * narrow // wide  # such a copy counts what it moves
                sources, targets = [s._replace(wide=True) for s in sources], [t._replace(wide=True) for t in targets]
            if sources[0].region == targets[0].region and sources[0].at == targets[0].at:
                return
        self.acts.setdefault((act.epoch, act.rank), []).append(act)
        parts = [self._read(source) for source in sources]
        total = self._sum(act, parts, bool(row[SRC_STEP])) if kind == SUM else parts[0]
        for target in targets:
            for source in sources:
                if source.region == target.region and source.at != target.at:
                    lo, hi = max(source.at, target.at), min(source.at, target.at) + source.nbytes
                    if lo < hi:
                        self.find("overlap", f"writes over bytes {lo}-{hi} of what it reads", target.act)
            self._write(target, total)

    def _reaches(self, o: _Operand, verb: str) -> None:
        """Looks whether an operand lies where it may, and is of the width that memory has."""
        if o.at < o.spot.first or o.at + o.nbytes > o.spot.first + o.spot.room:
            begin, what = o.at - o.spot.first, "memory that it has not" if o.spot.room == 0 else o.region
            self.find("beyond", f"{verb} bytes {begin}-{begin + o.nbytes} of {what}, of {o.spot.room}", o.act)
        if o.wide != o.spot.accumulators:
            takes = "accumulators" if o.wide else "elements of the user's dtype"
            self.find("width", f"{verb} {takes} in {o.region}, which does not hold them", o.act)

    def _read(self, source: _Operand) -> list[Part]:
        """The parts of an operand, in the user's bytes."""
        self._reaches(source, "reads")
        begin, end, (narrow, wide) = source.at, source.at + source.nbytes, self.unit
        if source.region.space != "temp":
            self._note(source.region, Access(begin, end, False, source.act))
        found = []
        for s in self._memory(source.region).read(begin, end):
            lo, hi = s.begin - begin, s.end - begin
            if source.wide:
                lo, hi = lo * narrow // wide, hi * narrow // wide
            found.append(Part(lo, hi, s.value, s.at))
            if s.value is None or s.value.call != self.number or s.wide != source.wide:
                self._bad_read(source, s)
        return found

    def _bad_read(self, source: _Operand, s: Segment) -> None:
        where = f"bytes {s.begin}-{s.end} of {source.region}"
        acts = (source.act,) if s.by is None else (source.act, s.by)
        if s.value is None:
            self.find("garbage", f"reads {where}, where nobody has written", source.act)
        elif s.value.call != self.number:
            self.find("stale", f"reads {where}, which an earlier call has left there", *acts)
        else:
            self.find("width", f"reads {where} as {'wide' if source.wide else 'narrow'}: they are not", *acts)

    def _write(self, target: _Operand, total: Sequence[Part]) -> None:
        self._reaches(target, "writes")
        begin, (narrow, wide) = target.at, self.unit
        if target.spot.given:
            self.find("input", f"writes into {target.region}, where it shall only read", target.act)
        if target.region.space != "temp":
            self._note(target.region, Access(begin, begin + target.nbytes, True, target.act))
        new = []
        for part in total:
            lo, hi, value = part.begin, part.end, part.value
            if target.wide:
                lo, hi = lo * wide // narrow, hi * wide // narrow
            elif narrow != wide and value is not None and not value.complete and not isinstance(value.tree, int):
                self.find("width", f"rounds a partial sum {value} in {target.region}", target.act)
            new.append(Segment(begin + lo, begin + hi, value, part.at, target.wide, target.act))
        self._memory(target.region).write(begin, begin + target.nbytes, new)

    def _sum(self, act: Act, operands: Sequence[Sequence[Part]], complete: bool) -> list[Part]:
        """Range by range: a left fold. (a + b) + c has the same bits added at once or one after the other."""
        if not operands:
            self.find("garbage", "sums nothing", act)
            return []
        found = []
        for lo, hi, parts in refined(operands):
            values = [part.value for part in parts if part.value is not None]
            places = {part.at for part in parts if part.value is not None}
            if len(values) < len(parts):
                found.append(Part(lo, hi, None, 0))
                continue
            if len(places) > 1:
                self.find("place", f"adds elements of different places: {sorted(places)}", act)
            found.append(Part(lo, hi, self._fold(act, values, complete), parts[0].at))
        return found

    def _fold(self, act: Act, values: Sequence[Value], complete: bool) -> Value:
        ranks = 0
        for value in values:
            if ranks & value.ranks:
                self.find("twice", f"adds a contribution twice: {' + '.join(map(str, values))}", act)
            ranks |= value.ranks
        if any(value.complete for value in values):
            self.find("complete", "adds to, or finishes again, a sum that is complete", act)
        elif complete != (ranks == self.every):
            missing = ", ".join(str(r) for r in range(self.n) if not ranks >> r & 1)
            state = f"though contributions are missing: {missing}" if complete else "though all contributions are in it"
            self.find("complete", f"marks its sum {'complete' if complete else 'partial'}, {state}", act)
        head = values[0].tree
        if len(values) == 1:
            return Value(head, ranks, values[0].call, complete)
        begun = (head,) if isinstance(head, int) else head
        return Value((*begun, *(v.tree for v in values[1:])), ranks, min(v.call for v in values), complete)

    # The end

    def _end(self, rank: int) -> None:
        """The postcondition, against the collective's own table."""
        t = self.tensors
        self.results = self.results if rank else []
        region, at = t.region(rank, "out")
        for block in t.blocks["out"][rank]:
            start, size, wanted = t.starts[block], t.sizes[block], t.givers[block]
            for s in self._memory(region).read(at, at + size) if size else ():
                act, by = Act(self.number, rank, self.epoch, 0, END, block), () if s.by is None else (s.by,)
                where, value = f"block {block} of the output, bytes {s.begin}-{s.end},", s.value
                if value is None or value.call != self.number:
                    self.find("lost", f"{where} has not been written by this call", act, *by)
                elif value.ranks != wanted:
                    self.find("lost", f"{where} is {value}, not {_those(wanted, self.n)}", act, *by)
                elif s.at - start != s.begin - at:
                    self.find("place", f"{where} has the elements from {s.at} on, not {start + s.begin - at}", act, *by)
                elif t.c.reduces and self.n > 1 and not value.complete:
                    self.find("complete", f"{where} is no finished sum, so that nothing has divided it", act, *by)
                else:
                    self.results.append((s.at, s.at + s.end - s.begin, value.tree))
            at += size

    def races(self) -> None:
        """Every two accesses of one epoch that cannot be told apart in time."""
        for regions in self.accesses.values():
            for region, found in regions.items():
                if len({a.act.rank for a in found}) > 1 and any(a.writes for a in found):
                    for a, b in _clashes(found):
                        self._race(region, a, b)

    def _race(self, region: Region, a: Access, b: Access) -> None:
        a, b = sorted((a, b), key=lambda x: (x.act.row < 0, x.writes))  # rows before the user's program, readers first
        kind = "user" if b.act.row < 0 else "race"
        does, other = ("writes" if x.writes else "reads" for x in (a, b))
        where = f"bytes {max(a.begin, b.begin)}-{min(a.end, b.end)} of {region}"
        text = f"{does} {where}, which {self.words(b.act)} {other} before the same meeting"
        self.find(kind, text, a.act, b.act)


def _clashes(found: Iterable[Access]) -> Iterator[tuple[Access, Access]]:
    ordered = sorted(found, key=lambda a: a.begin)
    for i, a in enumerate(ordered):
        for j in range(i + 1, len(ordered)):
            b = ordered[j]
            if b.begin >= a.end:
                break
            if (a.writes or b.writes) and a.act.rank != b.act.rank:
                yield a, b


def _those(ranks: int, n: int) -> str:
    return " + ".join(f"x{r}" for r in range(n) if ranks >> r & 1)
