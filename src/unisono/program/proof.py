"""Proof over the tables of all ranks: what a call leaves behind, and that no order of ranks can change it.

Meetings are full: all that a rank does before meeting k happens before all that anybody does after it, and nothing else
orders two ranks. So time is cut into *epochs*, the stretches before each meeting, and two accesses of different ranks
may fall on each other exactly if they are in one epoch. If no two of these touch a byte that one of them writes, all
interleavings end alike, and playing the epochs rank by rank proves all. The findings:

    meetings    ranks meet unequally often, so that a rank waits for ever, or never, so that nothing orders them
    race        two ranks touch a byte in one epoch, and one of them writes it
    user        a row touches a user's tensor while its program may: before the call begins there, or after it has ended
    garbage     a row reads where no rank has written, or only the user's program, beside its data
    stale       a row reads what an earlier call has left
    beyond      a row reaches outside its tensor, its area or its temporary memory
    overlap     a row writes over what it reads, in another place
    input       a row writes into an input
    place       elements of different places are added, or one lies at another one's place at the end
    twice       a contribution is added twice
    complete    a sum is marked complete without being so, or the other way round, or finished twice or never
    width       accumulators are read as elements of the user's dtype or those as accumulators, or a partial sum is
                rounded
    lost        at the end an output lacks a contribution

Every call is played twice, so that what the first leaves in the areas, and ranks that run ahead into the second, are
part of the proof. The program around the calls writes its tensors before and after each: that proves the last meeting
of direct calls. Interpreters (runtime/interpreter.py) do what a proof plays; the guard, handles and books are not rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import ScheduleError, UsageError
from unisono.program.bind import INTO, KIND, LINE, PART, Table, bind
from unisono.program.program import Program
from unisono.program.proof_memory import Act, Tree
from unisono.program.proof_play import AFTER, BEFORE, END, Call, Finding, Play
from unisono.units import show_count

__all__ = ["KINDS", "Call", "Finding", "Proof", "prove", "prove_calls", "prove_rows"]

KINDS = (
    "meetings", "race", "user", "garbage", "stale", "beyond", "overlap", "input", "place", "twice", "complete", "width",
    "lost",
)  # fmt: skip
_SHOWN = 2  # rows before and after the guilty one
_OPERANDS = 3


@dataclass(frozen=True, eq=False)
class Proof:
    """The result of playing the tables of all ranks; falsy if anything is wrong.

    ``findings``: by epoch. ``meetings``: of the last call. ``ordered``: every element is summed in one order on all
    ranks, so that they get the same bits. ``rank_order``: it is ((x0 + x1) + x2) + ...
    """

    calls: tuple[Call, ...]
    findings: tuple[Finding, ...]
    meetings: int
    ordered: bool
    rank_order: bool
    acts: dict[tuple[int, int], list[Act]]

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        table = self.calls[-1].tables[0]
        n, program = table.size, table.program
        what = f"{program.name}, {program.placement}, over {show_count(n, 'rank')}, {show_count(table.pieces, 'piece')}"
        if self.findings:
            return "\n".join([f"{what}: {show_count(len(self.findings), 'finding')}", *map(str, self.findings)])
        order = "one order" if self.ordered else "other orders on other ranks"
        order = "in " + ("rank order" if self.rank_order else order)
        sums = f", sums {order}" if program.collective.reduces and program.collective.name != "barrier" else ""
        return f"{what}: holds, {show_count(self.meetings, 'meeting')}{sums}"

    def raise_if_bad(self) -> None:
        """Raise ScheduleError with all findings if there are any, the first one drawn."""
        if self.findings:
            raise ScheduleError(f"{self}\n\n{self.draw()}")

    def draw(self, number: int = 0) -> str:
        """A finding as a counterexample: for each rank in it the rows around the guilty one, with an arrow at it.

        Raises UsageError if there is no such finding.
        """
        if not 0 <= number < len(self.findings):
            raise UsageError(f"there is no finding {number}: {show_count(len(self.findings), 'finding')}")
        finding = self.findings[number]
        blocks = [self._block(act, finding.kind if k == 0 else "") for k, act in enumerate(finding.acts)]
        return "\n\n".join([str(finding), *blocks])

    def _block(self, act: Act, note: str) -> str:
        """The acts of a rank around one, between two meetings."""
        begin = f"rank {act.rank}, epoch {act.epoch}: between meetings {act.epoch - 1} and {act.epoch}"
        if act.call < len(self.calls) - 1:
            begin += f", call {act.call} of {len(self.calls)}"
        rows = [a for a in self.acts.get((act.epoch, act.rank), []) if a.call == act.call]
        if act.row < 0:
            lines = [line for a in _ends(rows, act.row) for line in self._lines(a, None, note)]
            lines.insert(0 if act.row == BEFORE else len(lines), f"  --> {_WORDS[act.row]}")
            lines.insert(1 if act.row == BEFORE else len(lines), f"      ^ {note or 'here'}")
            return "\n".join([begin, *lines])
        at = next(i for i, a in enumerate(rows) if (a.iteration, a.row) == (act.iteration, act.row))
        lo, hi = max(0, at - _SHOWN), min(len(rows), at + _SHOWN + 1)
        lines = ["      ..."] if lo else []
        for i in range(lo, hi):
            lines += self._lines(rows[i], act if i == at else None, note)
        return "\n".join([begin, *lines, *(["      ..."] if hi < len(rows) else [])])

    def _lines(self, shown: Act, guilty: Act | None, note: str) -> list[str]:
        """A row and its operands; of many, those beside the guilty one."""
        call = self.calls[shown.call]
        kinds = call.tables[shown.rank].rows[:, KIND].tolist()
        last = shown.row + 1
        while last < len(kinds) and kinds[last] in (PART, INTO):
            last += 1
        at = guilty.operand if guilty is not None else shown.row
        near = [k for k in range(shown.row, last) if k == shown.row or abs(k - at) <= _OPERANDS]
        lines = []
        for before, k in zip([shown.row - 1, *near], near, strict=False):
            if k > before + 1:
                lines.append(f"{'':24}...")
            arrow = "  -->" if guilty is not None and k == at else "     "
            label = f" i={shown.iteration:<3}" if k == shown.row else "      "
            lines.append(f"{arrow}{label}{call.line(shown, k)}")
            if arrow.strip():
                lines.append(f"{'':13}^ {note or 'and this'}")
        return lines


_WORDS = {
    BEFORE: "the user's program writes its tensors, before the call",
    AFTER: "the user's program writes its tensors, after the call",
    END: "the end of the call",
}


def _ends(rows: list[Act], row: int) -> list[Act]:
    """The rows beside what is no row."""
    return rows[: _SHOWN + 1] if row == BEFORE else rows[-_SHOWN - 1 :]


def prove(
    tables: Sequence[Table],
    sizes: Sequence[int],
    area: int,
    *,
    in_place: bool = False,
    first_meeting: int = 0,
    listed: tuple[bool, bool] = (False, False),
) -> Proof:
    """Proves the tables of all ranks of one collective, by rank.

    ``sizes``: bytes of every block; ``area``: bytes of a rank's staging memory in a half; ``in_place``: input and
    output share memory, as the collective allows; ``first_meeting``: the number of the first
    meeting, whose parity counts; ``listed``: input, output are a tensor per block. Raises UsageError if the tables are
    not those of all ranks of one collective.
    """
    call = Call(tuple(tables), tuple(sizes), in_place, listed)
    return prove_calls([call] * 2, area, first_meeting)


def prove_calls(calls: Sequence[Call], area: int, first_meeting: int = 0) -> Proof:
    """Proves calls one after the other, by the same ranks over the same areas; otherwise as `prove`."""
    play = Play(area, first_meeting)
    begun = first_meeting
    for call in calls:
        _check(call)
        begun = play.meeting
        play.play(call)
        if play.findings:
            break
    play.races()
    found = tuple(sorted(play.findings.values(), key=lambda f: f.epoch))
    ordered, rank_order = _orders(play.results)
    return Proof(tuple(play.calls), found, play.meeting - begun, ordered, rank_order, play.acts)


def _check(call: Call) -> None:
    programs = [table.program for table in call.tables]
    wanted = programs[0].collective if programs else None
    ranks = [p.rank for p in programs]
    if wanted is None or any(p.collective != wanted for p in programs) or ranks != list(range(wanted.world_size)):
        given = ", ".join(f"{p.name} rank {p.rank} of {p.collective.world_size}" for p in programs)
        raise UsageError(f"a proof takes the tables of all ranks of one collective, by rank; got {given or 'none'}")
    blocks = wanted.num_chunks // wanted.pieces
    if len(call.sizes) != blocks:
        raise UsageError(f"{programs[0].name} has {blocks} blocks, got {len(call.sizes)} sizes")


def _orders(results: Sequence[tuple[int, int, Tree]]) -> tuple[bool, bool]:
    """True if each element has one tree everywhere, and whether that is the fold in rank order."""
    rank_order = all(isinstance(tree, int) or list(tree) == sorted(_leaves(tree)) for _, _, tree in results)
    reached, last, ordered = 0, None, True
    for begin, end, tree in sorted(results, key=lambda r: (r[0], r[1])):
        if last is not None and begin < reached and tree != last:
            ordered = False
        if end > reached or last is None:
            reached, last = max(end, reached), tree
    return ordered, rank_order


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for part in tree for leaf in _leaves(part)]


def prove_rows(
    rows: Sequence[Table] | Sequence[Program], sizes: Sequence[int] = (), area: int = 0, in_place: bool = False
) -> Proof:
    """Proves tables, or programs bound to ``sizes`` over ``area`` bytes; by themselves to three pieces, one of them
    shorter. Raises UsageError if tables come without sizes, and for programs that send messages.
    """
    tables = [row for row in rows if isinstance(row, Table)]
    programs = [row for row in rows if isinstance(row, Program)]
    if tables and (programs or not sizes or not area):
        raise UsageError("tables are proved for the sizes of all blocks and the area that they were bound to")
    if any(program.placement == "messages" for program in programs):
        raise UsageError(f"{programs[0].name} sends messages: what is proved are programs over shared memory")
    if programs:
        area = area or 4 * LINE * max(1, *(sum(p.slots) for p in programs), programs[0].collective.world_size)
        sizes = sizes or _three_pieces(programs[0], area)
        tables = [bind(program, sizes, area=area) for program in programs]
    return prove(tables, sizes, area, in_place=in_place)


def _three_pieces(program: Program, area: int) -> list[int]:
    """Sizes of blocks that take three pieces."""
    c = program.collective
    blocks = c.num_chunks // c.pieces
    part = bind(program, [1 << 20] * blocks, area=area).part
    return [2 * part * c.pieces + LINE + 4] * blocks
