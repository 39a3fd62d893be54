"""Any schedule as a program over the board: one meeting per step, guarded and asynchronous like every other call.

Before a meeting a rank stages, in its own area, the chunks that it sends in the step, each once, however many ranks
read them; after it, it copies or reduces what lands from its peers' areas. So a transfer carries what its source held
when the step began, and the parity of the board keeps one step's staging apart from the next's (transport/board.py).

Large data is walked in pieces: piece i of every chunk goes through the whole schedule before piece i + 1, so that what
one rank stages in a step always fits into its area. Neighbouring chunks travel as one where they are whole.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import UsageError
from unisono.run.arithmetic import Arithmetic, arithmetic
from unisono.run.layout import Layout, equal_blocks, layout
from unisono.run.operands import Operands
from unisono.run.plan import PlanStep, Span, plan
from unisono.run.programs import Program
from unisono.run.record import Event, Record
from unisono.schedule import Schedule
from unisono.transport.board import Board
from unisono.watch.call import SIGNATURE, Call, piece_numel

__all__ = ["scheduled", "told_sizes"]

Sizes = Sequence[int] | Callable[[], Sequence[int]]
_LINE = 64


def scheduled(
    board: Board,
    schedule: Schedule,
    sources: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    op: str = "",
    factor: float = 1.0,
    sizes: Sizes | None = None,
    deterministic: bool = False,
    record: Record | None = None,
) -> Program:
    """The program that carries this rank's share of a schedule out; all ranks of the board run it in the same call.

    `sources` and `results`: flat contiguous tensors of one dtype, one per block that the rank gives and takes (see
    operands.py: [tensor] and [tensor] for all_reduce; one per rank and [own] for reduce_scatter, and so on; [] where
    there is none). A source may be a result in the same place; they must not overlap otherwise. Sources are not
    written. `op`: the reduce op's name where the collective sums, `factor` that of PREMUL_SUM. `sizes`: elements of all
    blocks if they are not equal, or a function that tells them after the call's first meeting (`told_sizes`).
    `deterministic`: rank order, the bits of the backend's own path (unreduced.py). `record` is told of what lands.

    Raises UsageError at once if schedule, board and tensors do not fit, or the op means nothing for the dtype.
    """
    c = schedule.collective
    if c.world_size != board.size:
        raise UsageError(
            f"{schedule.name} {c.name} is made for {c.world_size} ranks; the group has {board.size}: build it for them"
        )
    share = plan(schedule, board.rank, deterministic)
    tensors = [*sources, *results]
    dtype = tensors[0].dtype if tensors else torch.uint8
    numbers = arithmetic(dtype, op if c.reduces and tensors else "", factor, c.world_size, share.deterministic)
    if c.name == "barrier":
        return _meet()
    if share.busiest * _LINE > board.stage_nbytes:
        raise UsageError(
            f"{schedule.name} {c.name}: a rank sends {share.busiest} chunks in one step, more than its staging area "
            f"of {board.stage_nbytes} bytes takes; use fewer chunks"
        )
    if sizes is None:
        sizes = equal_blocks(c, [t.numel() for t in sources], [t.numel() for t in results])

    def walk(told: Sequence[int]) -> Program:
        where = layout(share, tuple(told))
        return _Walk(board, where, Operands(where, sources, results, numbers), numbers, record).program()

    def after_meeting(tell: Callable[[], Sequence[int]]) -> Program:
        yield
        yield from walk(tell())

    return after_meeting(sizes) if callable(sizes) else walk(sizes)


def told_sizes(board: Board, call: Call, schedule: Schedule, dtype: torch.dtype) -> Callable[[], Sequence[int]]:
    """For calls whose headers tell the sizes of all pieces (`Call.sends`): reads the sizes of all blocks from them.

    To be called after the first meeting of the call, once the guard has found the headers to agree. Sizes are in
    elements of `dtype`, that of the tensors which travel (uint8 where data is only moved).
    """

    def sizes() -> Sequence[int]:
        n, root = board.size, schedule.collective.root
        scale = (call.dtype.itemsize if call.dtype else 1) // dtype.itemsize
        rows = []
        for rank in range(n):
            start, _ = board.header_span(1 - board.half, rank)
            numbers = struct.unpack_from(f"<{n}Q", board.segment.raw, start + SIGNATURE.size)
            rows.append([piece_numel(number) * scale for number in numbers])
        match schedule.collective.name:
            case "all_to_all":
                return [size for row in rows for size in row]
            case "scatter":
                return rows[root]
            case "gather":
                return [row[root] for row in rows]
        return [row[0] for row in rows]

    return sizes


def _meet() -> Program:
    yield


@dataclass(frozen=True, slots=True)
class _Copy:
    """`numel` elements at `at` in the work tensor; `slots`: (rank, element in its area) of each part, in rank order.

    In a reduction, this rank's own slot stands for what is there.
    """

    at: int
    numel: int
    slots: tuple[tuple[int, int], ...]
    reduce: bool


@dataclass(frozen=True, slots=True)
class _Moves:
    """A step of one piece: what is staged, what lands, what is summed (places of contributions, then of their sum)."""

    staged: tuple[_Copy, ...]
    landings: tuple[_Copy, ...]
    sums: tuple[tuple[slice, ...], ...]


class _Walk:
    """One run of a plan over a board."""

    def __init__(
        self, board: Board, whole: Layout, operands: Operands, numbers: Arithmetic, record: Record | None
    ) -> None:
        self.board, self.whole, self.plan = board, whole, whole.plan
        self.operands, self.numbers, self.record = operands, numbers, record
        self.areas = board.typed(numbers.carried)
        room = self.areas.shape[2] // max(1, self.plan.busiest)
        line = max(1, _LINE // numbers.carried.itemsize)
        self.width = whole.longest if whole.longest <= room else room // line * line

    def program(self) -> Program:
        """One meeting per step and piece, and at least one."""
        if not self.whole.longest or not self.plan.steps:
            yield
        for number, first in enumerate(range(0, self.whole.longest, self.width or 1)):
            where = self.whole.piece(number, self.width, self.operands.in_place)
            work = self.operands.load(where, first)
            for step, moves in enumerate(self._moves(where)):
                half = self.board.half
                mine = self.areas[half, self.board.rank]
                for copy in moves.staged:
                    at = copy.slots[0][1]
                    mine[at : at + copy.numel].copy_(work[copy.at : copy.at + copy.numel])
                yield
                for copy in moves.landings:
                    start = Record.now() if self.record is not None else 0.0
                    self._land(copy, work, half)
                    if self.record is not None:
                        self._note(self.record, where, copy, step, number, start)
                for places in moves.sums:
                    self.numbers.total([work[place] for place in places[:-1]], work[places[-1]])
            self.operands.store(where, work, first)

    def _land(self, copy: _Copy, work: torch.Tensor, half: int) -> None:
        here, rank = work[copy.at : copy.at + copy.numel], self.board.rank
        parts = [here if r == rank else self.areas[half, r, at : at + copy.numel] for r, at in copy.slots]
        if copy.reduce:
            self.numbers.combine(parts, here)
        else:
            here.copy_(parts[0])

    def _note(self, record: Record, where: Layout, copy: _Copy, step: int, piece: int, start: float) -> None:
        end, nbytes, rank = Record.now(), float(copy.numel * self.numbers.carried.itemsize), self.board.rank
        chunk = where.chunk_at(copy.at)
        for source, _ in copy.slots:
            if source != rank:
                event = Event(False, step, piece, source, rank, chunk, 1, start, end, nbytes, copy.reduce)
                record.events.append(event)

    def _moves(self, where: Layout) -> Sequence[_Moves]:
        """The plan's steps in elements; kept with the layout."""
        key = ("board", self.width)
        found = where.compiled.get(key)
        if found is None:
            found = where.compiled[key] = tuple(self._compile(where, step) for step in self.plan.steps)
        assert isinstance(found, tuple)
        return found

    def _compile(self, where: Layout, step: PlanStep) -> _Moves:
        width, rank, slot = self.width, self.board.rank, 0
        staged, landings, sums = [], [], []

        def runs(span: Span) -> list[tuple[int, int, int]]:
            return where.runs(span, lambda i: i * width)

        for span in step.staged:
            staged += [_Copy(at, numel, ((rank, (slot + i) * width),), False) for i, at, numel in runs(span)]
            slot += span.count
        for one in step.landings:
            own = [(rank, 0)] if one.reduce else []
            for i, at, numel in runs(one.span):
                slots = [(part.peer, (part.slot + i) * width) for part in one.parts]
                landings.append(_Copy(at, numel, tuple(sorted(slots + own)), one.reduce))
        c = self.plan.collective
        for span in step.sums:
            rows = [runs(Span(j * c.num_chunks + span.chunk, span.count)) for j in range(c.world_size + 1)]
            sums += [tuple(slice(at, at + numel) for _, at, numel in row) for row in zip(*rows, strict=True)]
        return _Moves(tuple(staged), tuple(landings), tuple(sums))
