"""Programs as a text grid: a column per rank, a line per meeting, between them what each rank does, in order.

    two_phase all_reduce · mailbox · 3 ranks · 3 chunks · 2 meetings

    step  rank 0               rank 1                rank 2
    ────────────────────────────────────────────────────────────────────────
    0     c1-2 s0-1 ← in       c0,2 s0-1 ← in        c0-1 s0-1 ← in
    meet  ───────────────────  ────────────────────  ───────────────────────
    0     c0 out, 1-2:s0 ← in  c1 out, 2:s1, 0:s0    c2 out, 0-1:s1 ← 0-1:s1
            + 1-2:s0             ← 0:s0 + in + 2:s1    + in
    meet  ───────────────────  ────────────────────  ───────────────────────
    1     c1-2 out ← s0-1      c0,2 out ← s0-1       c0-1 out ← s0-1

Chunks, then where they go, then what comes there. Neighbouring rows of one shape are one line: the k-th chunk has the
k-th slot, and of a copy the k-th rank; a sum has all the ranks that are named. Messages have a wait for a meeting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from unisono.drawing.colours import chunk_colour
from unisono.drawing.drawing import Cell, Drawing, Sheet, gap_in, shown_of
from unisono.drawing.messages import spans
from unisono.errors import UsageError
from unisono.program import Place, Program, Row
from unisono.units import show_count

__all__ = ["draw_program"]

_NARROWEST, _WIDEST, _GAP, _CORNER = 16, 48, 2, len("10-11")
_MAX_LINES, _TAIL, _LONG = 16, 4, 9
_SHORT = {"in": "in", "out": "out", "stage": "s", "temp": "t", "recvbuf": "m"}
_SPLIT = ("meet", "wait")


def draw_program(programs: Sequence[Program], width: int = 80, max_meetings: int = 40) -> Drawing:
    """The grid of the programs of some ranks in one collective, one column each.

    The result prints as plain text and, with rich, in colour; what does not fit is left out, with a note. Raises
    UsageError if the programs do not belong together.
    """
    _check(programs)
    parts = [_segments(program) for program in programs]
    lines = shown_of(max(map(len, parts)), max(max_meetings + 1, 2 * _TAIL), _TAIL)
    columns, room = _columns(len(programs), width - _CORNER)
    words = _Words(programs[0].collective.num_chunks, room)
    sheet = _sheet([programs[i] for i in columns], [parts[i] for i in columns], lines, words)
    sheet = sheet.broken(None, gap_in(columns))
    ranks = [programs[i].rank for i in range(len(programs)) if i not in columns]
    notes = [f"ranks {spans(ranks)} not shown"] if ranks else []
    gap = gap_in(lines)
    notes += [] if gap is None else [f"between meetings {gap} and {lines[gap]} not shown"]
    below = [_legend(programs), *(Text(note, "italic") for note in notes)]
    body = Group(Text(_title(programs), "bold"), Text(), sheet.table(), Text(), *below)
    return Drawing("text", body, max(width, sheet.width))


def _check(programs: Sequence[Program]) -> None:
    """Raises UsageError unless these are programs of different ranks in one collective."""
    if not programs:
        raise UsageError("no program to draw")
    first = programs[0]
    for other in programs[1:]:
        if (other.name, other.collective, other.placement) != (first.name, first.collective, first.placement):
            raise UsageError(f"programs of two calls: {first!r} and {other!r}")


def _columns(number: int, width: int) -> tuple[list[int], int]:
    """Which programs fit, at least two, and the characters that each has."""
    most = width // (_NARROWEST + _GAP)
    if number > most:
        width -= 1 + _GAP  # the dots
        most = max(2, width // (_NARROWEST + _GAP))
    shown = shown_of(number, most, 1)
    return shown, max(_NARROWEST, min(_WIDEST, width // len(shown) - _GAP))


def _title(programs: Sequence[Program]) -> str:
    first = programs[0]
    c = first.collective
    who = f"rank {first.rank} of {c.world_size}" if len(programs) == 1 else show_count(c.world_size, "rank")
    ends = show_count(first.meetings, "meeting")
    if first.placement == "messages":
        ends = show_count(sum(row.kind == "wait" for row in first.rows), "wait")
    root = [f"root {c.root}"] if c.rooted else []
    order = ["sums in rank order"] if first.deterministic else []
    return " · ".join([first.name, first.placement, who, show_count(c.num_chunks, "chunk"), ends, *root, *order])


def _segments(program: Program) -> list[list[list[Row]]]:
    """The rows before the first meeting, and after each one, neighbours of one shape gathered."""
    found: list[list[list[Row]]] = [[]]
    for row in program.rows:
        if row.kind in _SPLIT:
            found.append([])
        elif found[-1] and _alike(found[-1][-1][-1], row):
            found[-1][-1].append(row)
        else:
            found[-1].append([row])
    return found


def _alike(a: Row, b: Row) -> bool:
    """True if two rows have the same shape; sums must also name the same ranks."""
    if (a.kind, a.complete, a.peer, len(a.to), len(a.parts)) != (b.kind, b.complete, b.peer, len(b.to), len(b.parts)):
        return False
    pairs = zip(a.to + a.parts, b.to + b.parts, strict=True)
    return all(
        p.space == q.space and (p.rank == q.rank if a.kind == "sum" else (p.rank < 0) == (q.rank < 0)) for p, q in pairs
    )


def _sheet(
    programs: Sequence[Program], parts: Sequence[list[list[list[Row]]]], lines: list[int], words: "_Words"
) -> Sheet:
    """The cells in words, those of a meeting a rule as wide as the column."""
    names: list[str] = []
    cells: list[list[Cell]] = []
    between = next((row.kind for row in programs[0].rows if row.kind in _SPLIT), "meet")
    for number, at in enumerate(lines):
        row = [part[at] if at < len(part) else [] for part in parts]
        steps = sorted({each.step for cell in row for group in cell for each in group})
        if at:
            cells.append([[] for _ in parts])
            names.append(between)
        if number and at != lines[number - 1] + 1:
            cells.append([[Text("…", "dim")] for _ in parts])
            names.append("…")
            cells.append([[] for _ in parts])
            names.append(between)
        if steps:
            cells.append([words.cell(cell) for cell in row])
            names.append(spans(steps))
    sheet = Sheet("step", [f"rank {program.rank}" for program in programs], names, cells, _GAP)
    for cell_row in cells:
        for cell, wide in zip(cell_row, sheet.widths[1:], strict=True):
            if not cell:
                cell.append(Text("─" * wide, "dim"))
    return sheet


@dataclass(frozen=True)
class _Words:
    """Puts rows into words, of up to ``width`` characters a line."""

    num_chunks: int
    width: int

    def cell(self, groups: list[list[Row]]) -> Cell:
        """A line, or several, per group."""
        if not groups:
            return [Text("·", "dim")]
        kept = groups if len(groups) <= _MAX_LINES else groups[: _MAX_LINES - 1]
        lines = [line for group in kept for line in self._lines(group)]
        return lines if kept is groups else [*lines, Text(f"…{len(groups) - len(kept)} more", "dim")]

    def _lines(self, rows: list[Row]) -> Cell:
        """One group, broken between places where it is too long."""
        first = rows[0]
        chunks = f"c{_numbers([row.chunk for row in rows])}"
        lines = [Text.assemble((chunks, chunk_colour(first.chunk, self.num_chunks)))]
        at = len(chunks)
        for word in _words(rows):
            if at + 1 + len(word) > self.width:
                lines.append(Text("  " + word))
                at = 2 + len(word)
            else:
                lines[-1].append(f" {word}")
                at += 1 + len(word)
        return lines


def _words(rows: list[Row]) -> list[str]:
    """The destination and the source of a row."""
    first = rows[0]
    to = _terms([[row.to[k] for row in rows] for k in range(len(first.to))], rows)
    parts = _terms([[row.parts[k] for row in rows] for k in range(len(first.parts))], rows)
    if first.kind == "send":
        return [*parts, f"→{first.peer}"]
    if first.kind == "recv":
        return [*to, f"←{first.peer}"]
    more = [] if first.complete else ["+ …"]
    return [*(f"{place}," for place in to[:-1]), to[-1], f"← {parts[0]}", *(f"+ {part}" for part in parts[1:]), *more]


def _terms(places: list[list[Place]], rows: list[Row]) -> list[str]:
    """Places of a row, each as it goes through the rows; neighbours that differ in their rank alone are one."""
    runs: list[list[list[Place]]] = []
    for each in places:
        if runs and _next_rank(runs[-1][-1], each):
            runs[-1].append(each)
        else:
            runs.append([each])
    return [_term(run, rows) for run in runs]


def _next_rank(a: list[Place], b: list[Place]) -> bool:
    return all(
        p.rank >= 0 and p.space == q.space and p.index == q.index and q.rank == p.rank + 1
        for p, q in zip(a, b, strict=True)
    )


def _term(run: list[list[Place]], rows: list[Row]) -> str:
    """``in``, ``s0-1``, ``1-3:s0``."""
    first = run[0]
    name = _SHORT[first[0].space]
    if first[0].space in ("stage", "temp", "recvbuf"):
        name += _numbers([place.index for place in first])
    elif any(place.index != row.chunk for place, row in zip(first, rows, strict=True)):
        name += f"[{_numbers([place.index for place in first])}]"
    ranks = [each[0].rank for each in run] if len(run) > 1 else [place.rank for place in first]
    return name if ranks[0] < 0 else f"{_numbers(ranks)}:{name}"


def _numbers(numbers: list[int]) -> str:
    """One number if all are the same, else ranges, or how many there are."""
    if len(set(numbers)) == 1:
        return str(numbers[0])
    whole = spans(numbers)
    return whole if len(whole) <= _LONG else f"×{len(numbers)}"


def _legend(programs: Sequence[Program]) -> Text:
    """The signs, as far as they occur."""
    rows = [row for program in programs for row in program.rows]
    spaces = {place.space for row in rows for place in row.to + row.parts}
    peer = next((place for row in rows for place in row.to + row.parts if place.rank >= 0), None)
    words = {
        "in, out the user's tensors": spaces & {"in", "out"},
        "s staging memory": "stage" in spaces,
        "t memory of its own": "temp" in spaces,
        "m a message's buffer": "recvbuf" in spaces,
        f"{peer.rank}:{_SHORT[peer.space]} of rank {peer.rank}" if peer else "": peer is not None,
        "+ summed in this order": any(len(row.parts) > 1 for row in rows),
        "… not all contributions yet": any(not row.complete for row in rows),
    }
    return Text(", ".join(meaning for meaning, occurs in words.items() if occurs), "dim")
