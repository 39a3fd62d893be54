"""The contents of memory while the programs of all ranks are played: by bytes, whose contributions to which elements.

A *value* stands for the elements of a range: the tree of contributions that were added up, in that order. A *segment*
is a range of memory with the value there, the place of its first element in the whole vector, whether it is kept as
accumulators, and the row that wrote it. Nothing here knows rows or meetings; proof.py plays them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from unisono.program.bind import Bases, Table
from unisono.schedule import Collective

__all__ = ["Act", "Memory", "Part", "Region", "Segment", "Spot", "Tensors", "Tree", "Value", "refined"]

Tree = int | tuple["Tree", ...]
"""A rank's contribution, or a left fold: (a, b, c) is (a + b) + c."""


class Value(NamedTuple):
    """A sum of contributions: their tree, their ranks as bits, the call they were made in, whether it is finished."""

    tree: Tree
    ranks: int
    call: int
    complete: bool = False

    def __str__(self) -> str:
        return _show(self.tree)


def _show(tree: Tree) -> str:
    if isinstance(tree, int):
        return f"x{tree}"
    return "(" + " + ".join(map(_show, tree)) + ")"


class Act(NamedTuple):
    """Row ``row`` of a rank at work in an iteration of a call; ``operand``: its row that says where.

    ``row`` is -1 for the program around the call before it, -2 after it, -3 for the end of the call.
    """

    call: int
    rank: int
    epoch: int
    iteration: int
    row: int
    operand: int


class Region(NamedTuple):
    """Memory that is one piece: a rank's in, out or tensor (in place: both), temp, stage (parity 0 or 1)."""

    rank: int
    space: str
    parity: int = 0

    def __str__(self) -> str:
        if self.space == "stage":
            return f"rank {self.rank}'s staging memory, {('even', 'odd')[self.parity]} half"
        names = {"in": "input", "out": "output", "temp": "temporary memory"}
        return f"rank {self.rank}'s {names.get(self.space, self.space)}"


class Segment(NamedTuple):
    """Bytes begin .. end-1 of a region. ``value`` None: no rank has written there, or the user has since."""

    begin: int
    end: int
    value: Value | None
    at: int
    wide: bool
    by: Act | None


class Part(NamedTuple):
    """Bytes begin .. end-1 of an operand, counted in the user's dtype."""

    begin: int
    end: int
    value: Value | None
    at: int


class Memory:
    """One region: sorted segments that do not overlap. ``unit``: bytes of an element, and of its accumulator."""

    def __init__(self, unit: tuple[int, int] = (1, 1)) -> None:
        self._starts: list[int] = []
        self._segments: list[Segment] = []
        self._narrow, self._wide = unit

    def _user(self, nbytes: int, wide: bool) -> int:
        return nbytes * self._narrow // self._wide if wide else nbytes

    def read(self, begin: int, end: int) -> list[Segment]:
        """The contents of a range, without a gap."""
        found: list[Segment] = []
        reached, i = begin, max(0, bisect_right(self._starts, begin) - 1)
        while i < len(self._segments) and self._segments[i].begin < end:
            s = self._segments[i]
            i += 1
            if s.end <= reached:
                continue
            lo, hi = max(s.begin, reached), min(s.end, end)
            if lo > reached:
                found.append(Segment(reached, lo, None, 0, False, None))
            found.append(self._cut(s, lo, hi))
            reached = hi
        if reached < end:
            found.append(Segment(reached, end, None, 0, False, None))
        return found

    def _cut(self, s: Segment, lo: int, hi: int) -> Segment:
        if (lo, hi) == (s.begin, s.end):
            return s
        return Segment(lo, hi, s.value, s.at + self._user(lo - s.begin, s.wide), s.wide, s.by)

    def write(self, begin: int, end: int, new: Sequence[Segment]) -> None:
        """Replaces what lies there."""
        i = bisect_right(self._starts, begin)
        if i and self._segments[i - 1].end > begin:
            i -= 1
        j = i
        while j < len(self._segments) and self._segments[j].begin < end:
            j += 1
        kept = list(new)
        if i < j:
            first, last = self._segments[i], self._segments[j - 1]
            if first.begin < begin:
                kept.insert(0, self._cut(first, first.begin, begin))
            if last.end > end:
                kept.append(self._cut(last, end, last.end))
        self._segments[i:j] = kept
        self._starts[i:j] = [s.begin for s in kept]


def refined(operands: Sequence[Sequence[Part]]) -> list[tuple[int, int, list[Part]]]:
    """Ranges in each of which every operand is one part, and those parts."""
    if len(operands) == 1:
        return [(part.begin, part.end, [part]) for part in operands[0]]
    cuts = sorted({x for parts in operands for part in parts for x in (part.begin, part.end)})
    found, index = [], [0] * len(operands)
    for lo, hi in pairwise(cuts):
        here = []
        for k, parts in enumerate(operands):
            while parts[index[k]].end <= lo:
                index[k] += 1
            part = parts[index[k]]
            here.append(Part(lo, hi, part.value, part.at + lo - part.begin))
        found.append((lo, hi, here))
    return found


class Spot(NamedTuple):
    """The place of a base: byte ``first`` of a region, ``room`` bytes from there on; ``given``: it is an input."""

    region: Region
    first: int
    room: int
    given: bool
    accumulators: bool


_SAME = ("all_reduce", "broadcast", "reduce", "all_to_all", "barrier")


class Tensors:
    """The places of the tensors and areas of a call.

    ``sizes``: bytes of every block; ``in_place``: input and output share memory; ``listed``: whether input and output
    are a tensor per block.
    """

    def __init__(
        self, tables: Sequence[Table], sizes: Sequence[int], area: int, in_place: bool, listed: tuple[bool, bool]
    ) -> None:
        self.tables, self.sizes, self.area, self.in_place, self.listed = tables, sizes, area, in_place, listed
        program = tables[0].program
        self.c: Collective = program.collective
        self.bases = Bases(self.c.world_size)
        self.blocks = {"in": program.blocks_in, "out": program.blocks_out}
        self.starts = [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + size)
        self.givers = [0] * len(sizes)
        for rank, blocks in program.blocks_in.items():
            for block in blocks:
                self.givers[block] |= 1 << rank
        self._spots: dict[tuple[int, int], Spot] = {}

    def region(self, rank: int, side: str) -> tuple[Region, int]:
        """The region of a rank's input or output, and where in it that begins."""
        if not self.in_place:
            return Region(rank, side), 0
        name = self.c.name
        inner = name not in _SAME and side == ("in" if name in ("all_gather", "gather") else "out")
        return Region(rank, "tensor"), self.starts[rank] if inner else 0

    def spot(self, rank: int, base: int) -> Spot:
        """The place of base ``base`` of the table of ``rank``; staging memory as if the parity were even."""
        found = self._spots.get((rank, base))
        if found is None:
            found = self._spots[rank, base] = self._find(rank, base)
        return found

    def _find(self, rank: int, base: int) -> Spot:
        n, table = self.c.world_size, self.tables[rank]
        accumulates = table.wide != table.itemsize
        if base >= self.bases.stages:
            parity, owner = divmod(base - self.bases.stages, n)
            return Spot(Region(owner, "stage", parity & 1), 0, self.area, False, accumulates)
        if base == self.bases.temp:
            return Spot(Region(rank, "temp"), 0, table.temp_nbytes, False, accumulates)
        kind, number = divmod(base - (base > 2 * n), n)
        owner, side = (rank if kind < 2 else number), ("in", "out")[kind & 1]
        blocks = self.blocks[side][owner]
        region, first = self.region(owner, side)
        if kind < 2 and self.listed[kind] and len(blocks) > 1:
            first += sum(self.sizes[b] for b in blocks[:number])
            room = self.sizes[blocks[number]] if number < len(blocks) else 0
        else:
            room = sum(self.sizes[b] for b in blocks) if kind >= 2 or number == 0 else 0
        return Spot(region, first, room, side == "in", False)
