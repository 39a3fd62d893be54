"""A program: what one rank does in a call of a collective, as rows over named spaces. No sizes, no meeting numbers.

    copy c0 stage[0] <- in[0]                       one chunk from a place to a place
    sum c1 out[1] 0:stage[1] <- 0:stage[0] in[1]    parts combined in the order listed, written to every place before <-
    meet                                            a point that no rank passes before all ranks of the host have come
    send c0 2 <- in[0] | recv c0 recvbuf[0] <- 1       a message to, or from, a peer; rows of one step and peer are one
    wait                                            for every message of this step

A place is a space and an index, of this rank, or of the rank before the colon:

    in[c], out[c]    chunk c of the user's input and output
    stage[s]         slot s of the staging memory, which every rank of the host can read and write
    temp[t]          memory of this rank alone
    recvbuf[m]          buffers of messages

The chunk ``c`` of a row says how long its places are. A sum is *complete* if every rank's contribution is in it: there
an average divides, and 16 bits are rounded. Any other sum is *partial*, and so is what a rank stages of it: its places
hold accumulators, which may be wider than the user's dtype. Slots are numbered through the steps of a program, so that
what is staged in one step never lands on what another one staged; `bind` decides what may share memory.

The golden files and the drawings read these rows; `bind` turns them into words for an interpreter.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from unisono.errors import UsageError
from unisono.schedule import Collective

__all__ = ["PLACEMENTS", "Place", "Program", "Row"]

PLACEMENTS = ("staged", "mailbox", "put", "direct", "pushed", "messages")
"""Placements of a program's data: through staging memory, a meeting per step; *mailbox*: sums are pushed back into the
slots of their parts; *put*: what is sent goes straight into the staging memory of every reader; *direct*: between the
users' tensors; *pushed*: the same, the root of a broadcast writing a part of the data into the tensors of its peers;
*messages*: over a transport."""
_SPACES = ("in", "out", "stage", "temp", "recvbuf")


@dataclass(frozen=True, slots=True)
class Place:
    """Index ``index`` of a space, of this rank (``rank`` -1) or of another."""

    space: str
    index: int
    rank: int = -1

    def __str__(self) -> str:
        return f"{self.space}[{self.index}]" if self.rank < 0 else f"{self.rank}:{self.space}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Row:
    """One row; which fields count follows from ``kind``: copy, sum, meet, send, recv or wait."""

    kind: str
    step: int
    chunk: int = -1
    to: tuple[Place, ...] = ()
    parts: tuple[Place, ...] = ()
    complete: bool = True
    peer: int = -1

    def __str__(self) -> str:
        if self.kind in ("meet", "wait"):
            return self.kind
        to = " ".join(map(str, self.to)) if self.to else str(self.peer)
        source = " ".join(map(str, self.parts)) if self.parts else str(self.peer)
        return f"{self.kind} c{self.chunk} {to} <- {source}" + ("" if self.complete else " partial")


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's rows for one collective by one schedule and placement.

    ``slots``: of every step, how many slots of staging memory it has, the most of any rank; slots are numbered through
    all steps. ``temps``, ``recvbufs``: how many places there are. ``deterministic``: every sum is taken at once, of all
    contributions, in rank order. ``partial``: some rank keeps or sends partial sums, so that staging and temporary
    memory hold accumulators.
    """

    schedule: str
    collective: Collective
    rank: int
    placement: str
    rows: tuple[Row, ...]
    slots: tuple[int, ...] = ()
    temps: int = 0
    recvbufs: int = 0
    deterministic: bool = False
    partial: bool = False

    @property
    def name(self) -> str:
        """The schedule and what it does: ``ring all_reduce``."""
        return f"{self.schedule} {self.collective.name}"

    @property
    def meetings(self) -> int:
        """Meetings of one run of the rows."""
        return sum(row.kind == "meet" for row in self.rows)

    @cached_property
    def blocks_in(self) -> dict[int, tuple[int, ...]]:
        """The blocks of every rank's input, in order: a chunk c belongs to block c // pieces."""
        return _blocks(self.collective, before=True)

    @cached_property
    def blocks_out(self) -> dict[int, tuple[int, ...]]:
        """The blocks of every rank's output."""
        return _blocks(self.collective, before=False)

    def to_text(self) -> str:
        """A header and a line per row; `from_text` reads it."""
        c = self.collective
        root = f" root {c.root}" if c.rooted else ""
        order = " deterministic" * self.deterministic + " partial" * self.partial
        slots = ",".join(map(str, self.slots)) or "0"
        head = (
            f"program {self.name} rank {self.rank} of {c.world_size} chunks {c.num_chunks}{root} {self.placement} "
            f"slots {slots} temps {self.temps} recvbufs {self.recvbufs}{order}"
        )
        return "\n".join([head, *(f"step {row.step}: {row}" for row in self.rows), ""])

    @staticmethod
    def from_text(text: str) -> "Program":
        """The program that a text describes. Raises UsageError naming the line that cannot be read."""
        head, *lines = text.strip().splitlines()
        found = _HEAD.fullmatch(head.strip())
        if found is None:
            raise UsageError(f"line 1: expected 'program NAME COLLECTIVE rank R of N ...', got {head!r}")
        name, what, rank, n, chunks, root, placement, slots, temps, recvbufs, order, partial = found.groups()
        rows = tuple(_row(number, line) for number, line in enumerate(lines, 2) if line.strip())
        c = Collective(what, int(n), int(chunks), int(root or 0))
        slot_counts = tuple(map(int, slots.split(","))) if slots != "0" else ()
        return Program(
            name, c, int(rank), placement, rows, slot_counts, int(temps), int(recvbufs), bool(order), bool(partial)
        )

    __str__ = to_text

    def __repr__(self) -> str:
        return (
            f"<{self.name}, {self.placement}: rank {self.rank} of {self.collective.world_size}, {len(self.rows)} rows>"
        )


def _blocks(c: Collective, before: bool) -> dict[int, tuple[int, ...]]:
    held = c.held_before() if before else c.held_after()
    return {r: tuple(sorted({int(chunk) // c.pieces for chunk in row.nonzero()[0]})) for r, row in enumerate(held)}


_HEAD = re.compile(
    r"program (\S+) (\w+) rank (\d+) of (\d+) chunks (\d+)(?: root (\d+))? (\w+) slots ([\d,]+) temps (\d+) "
    r"recvbufs (\d+)( deterministic)?( partial)?"
)
_ROW = re.compile(r"step (\d+): (copy|sum|send|recv) c(\d+) (.+) <- (.+?)( partial)?")
_BARE = re.compile(r"step (\d+): (meet|wait)")
_PLACE = re.compile(rf"(?:(\d+):)?({'|'.join(_SPACES)})\[(\d+)\]")


def _row(number: int, line: str) -> Row:
    if found := _BARE.fullmatch(line.strip()):
        return Row(found[2], int(found[1]))
    found = _ROW.fullmatch(line.strip())
    if found is None:
        raise UsageError(f"line {number}: expected 'step S: KIND ...', got {line!r}")
    step, kind, chunk, to, source, partial = found.groups()
    peer = int(to) if kind == "send" else int(source) if kind == "recv" else -1
    targets = () if kind == "send" else _places(number, to)
    parts = () if kind == "recv" else _places(number, source)
    return Row(kind, int(step), int(chunk), targets, parts, not partial, peer)


def _places(number: int, text: str) -> tuple[Place, ...]:
    found = []
    for word in text.split():
        match = _PLACE.fullmatch(word)
        if match is None:
            raise UsageError(f"line {number}: {word!r} is no place; expected e.g. in[0] or 2:stage[1]")
        found.append(Place(match[2], int(match[3]), int(match[1]) if match[1] else -1))
    return tuple(found)
