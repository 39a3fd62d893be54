"""The interpreter of a `messages` program: post a step's messages, wait for each, then combine and copy what came.

Rows of one step and peer are one message, its chunks in the order of the rows, which both ends list alike. A message of
chunks that lie together leaves from there, and arrives there; any other goes through a buffer of its size. A message
without elements is not posted. Receives are waited for first, for others wait on what comes of them; then sends, since
what a step writes may lie where its messages leave from.

Where partial sums travel, what is not the user's memory, and every message, holds accumulators: bfloat16, float16 and
float8 go as float32 (complex32 as complex64) and are rounded once, two (four) times the bytes and no accuracy lost. In
a deterministic program contributions travel apart, in the user's dtype.

Rows become slices of flat tensors once per program and size (`_share`), neighbours that are treated alike as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import torch

from unisono.program import Place, Program, Row
from unisono.runtime.reduce import Reducer
from unisono.transport.base import Transport

__all__ = ["chunk_spans", "execute"]

Tensors = Sequence[torch.Tensor]
_MEMORY = ("in", "out", "temp", "recvbuf")
"""The spaces, in the order of their tensors."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements start .. stop-1 of a tensor, by its number: see `_MEMORY`."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def leads_to(self, other: "_Span") -> bool:
        """True if the other one goes on where this one ends."""
        return (self.tensor, self.stop) == (other.tensor, other.start)

    def of(self, memory: Tensors) -> torch.Tensor:
        return memory[self.tensor][self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Message:
    peer: int
    spans: tuple[_Span, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class _Act:
    """One part copied (``total`` false), or parts combined in their order; ``complete``: all contributions are in."""

    to: _Span
    parts: tuple[_Span, ...]
    total: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: messages to post, rows to run overlapped, rows to run on what arrived."""

    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]
    overlapped: tuple[_Act, ...]
    landings: tuple[_Act, ...]


@dataclass(frozen=True, slots=True)
class _Share:
    """A program in elements; ``temp`` and ``recvbuf``: elements of each, of ``recvbuf`` in the step that has most."""

    steps: tuple[_Step, ...]
    temp: int
    recvbuf: int


def execute(
    program: Program,
    transport: Transport,
    source: torch.Tensor | None,
    result: torch.Tensor | None,
    combine: Reducer | None = None,
) -> None:
    """Runs a program lowered to messages.

    ``source`` and ``result``: flat tensors of one dtype, of the blocks that the rank has and shall have
    (``program.blocks_in``, ``blocks_out``), all of one size, in order; None for none. ``combine``: for collectives that
    sum. Raises what the transport raises; the result is then undefined.
    """
    some, blocks = (source, program.blocks_in) if source is not None else (result, program.blocks_out)
    assert some is not None
    share = _share(program, some.numel() // len(blocks[program.rank]))
    wide = combine.wide if combine is not None and program.partial else None
    carried = wide or some.dtype
    scratch = [torch.empty(numel, dtype=carried, device=some.device) for numel in (share.temp, share.recvbuf)]
    memory = [operand if operand is not None else some[:0] for operand in (source, result)] + scratch
    for step in share.steps:
        sends = [(message.peer, _outgoing(message, memory, carried)) for message in step.sends]
        receives = [(message.peer, _incoming(message, memory, carried)) for message in step.receives]
        waits = transport.post(sends, receives) if sends or receives else []
        for act in step.overlapped:
            _run_act(act, memory, combine, program)
        for wait in (*waits[len(sends) :], *waits[: len(sends)]):
            wait()
        for message, (_, came) in zip(step.receives, receives, strict=True):
            _unpack(message, came, memory)
        for act in step.landings:
            _run_act(act, memory, combine, program)


def _outgoing(message: _Message, memory: Tensors, carried: torch.dtype) -> torch.Tensor:
    if len(message.spans) == 1 and memory[message.spans[0].tensor].dtype == carried:
        return message.spans[0].of(memory)
    buffer, at = memory[-1].new_empty(message.numel), 0
    for span in message.spans:
        buffer[at : at + span.numel].copy_(span.of(memory))
        at += span.numel
    return buffer


def _incoming(message: _Message, memory: Tensors, carried: torch.dtype) -> torch.Tensor:
    if len(message.spans) == 1 and memory[message.spans[0].tensor].dtype == carried:
        return message.spans[0].of(memory)
    return memory[-1].new_empty(message.numel)


def _unpack(message: _Message, came: torch.Tensor, memory: Tensors) -> None:
    """Nothing to do for what came where it belongs."""
    at = 0
    for span in message.spans:
        place = span.of(memory)
        if place.data_ptr() != came.data_ptr():
            place.copy_(came[at : at + span.numel])
        at += span.numel


def _run_act(act: _Act, memory: Tensors, combine: Reducer | None, program: Program) -> None:
    to, parts = act.to.of(memory), [part.of(memory) for part in act.parts]
    if act.total:
        assert combine is not None
        combine(parts, to, program.collective.world_size if act.complete else 0)
    elif to.data_ptr() != parts[0].data_ptr():
        to.copy_(parts[0])


def chunk_spans(size: int, pieces: int) -> list[tuple[int, int]]:
    """First element, and the one after the last, of each of the chunks that a block is cut into.

    They have equal lengths, but for the last ones, which may be shorter or empty.
    """
    each = -(-size // pieces)
    ends = [min(k * each, size) for k in range(pieces + 1)]
    return list(pairwise(ends))


@lru_cache(maxsize=512)
def _share(program: Program, block: int) -> _Share:
    """The program in elements, of which every block has so many."""
    return _Compiling(program, block).share()


class _Compiling:
    """One share in the making."""

    def __init__(self, program: Program, block: int) -> None:
        self.program, self.pieces, self.block = program, program.collective.pieces, block
        self.chunks = chunk_spans(block, self.pieces)
        rank = program.rank
        self.blocks = {"in": program.blocks_in[rank], "out": program.blocks_out[rank]}
        self.found: dict[Place, _Span] = {}  # temporary memory and receive buffers, as far as they have been given out
        self.temp = 0

    def share(self) -> _Share:
        steps, most = [], 0
        for _, rows in groupby(self.program.rows, key=lambda row: row.step):
            step, recvbuf = self._step(list(rows))
            steps.append(step)
            most = max(most, recvbuf)
        return _Share(tuple(steps), self.temp, most)

    def _step(self, rows: list[Row]) -> tuple[_Step, int]:
        """A step, and how many elements of recvbuf it has: recvbuf is read in the step it comes in, and used again."""
        sends: dict[int, list[_Span]] = {}
        receives: dict[int, list[_Span]] = {}
        overlapped: list[_Act] = []
        landings: list[_Act] = []
        recvbuf, under_way = 0, any(row.kind == "wait" for row in rows)
        for row in rows:
            if row.kind == "wait":
                under_way = False
            elif row.kind == "send":
                sends.setdefault(row.peer, []).append(self._span(row.parts[0], row.chunk))
            elif row.kind == "recv":
                span = self._span(row.to[0], row.chunk, recvbuf)
                recvbuf += span.numel if _MEMORY[span.tensor] == "recvbuf" else 0
                receives.setdefault(row.peer, []).append(span)
            else:
                parts = tuple(self._span(part, row.chunk) for part in row.parts)
                act = _Act(self._span(row.to[0], row.chunk), parts, row.kind == "sum", row.complete)
                _add(overlapped if under_way else landings, act)
        return _Step(_messages(sends), _messages(receives), tuple(overlapped), tuple(landings)), recvbuf

    def _span(self, place: Place, chunk: int, recvbuf: int = 0) -> _Span:
        """The memory of a chunk; ``recvbuf``: the offset of the next new buffer."""
        start, stop = self.chunks[chunk % self.pieces]
        tensor = _MEMORY.index(place.space)
        if place.space in self.blocks:
            first = self.blocks[place.space].index(place.index // self.pieces) * self.block
            return _Span(tensor, first + start, first + stop)
        if place not in self.found:
            at = recvbuf if place.space == "recvbuf" else self.temp
            self.found[place] = _Span(tensor, at, at + stop - start)
            self.temp += stop - start if place.space == "temp" else 0
        return self.found[place]


def _messages(by_peer: dict[int, list[_Span]]) -> tuple[_Message, ...]:
    found = []
    for peer, spans in by_peer.items():
        joined: list[_Span] = []
        for span in spans:
            if joined and joined[-1].leads_to(span):
                joined[-1] = _Span(span.tensor, joined[-1].start, span.stop)
            elif span.numel:
                joined.append(span)
        if joined:
            found.append(_Message(peer, tuple(joined), sum(span.numel for span in joined)))
    return tuple(found)


def _add(acts: list[_Act], act: _Act) -> None:
    """Appends an act, to the last one if it goes on where that ends, at every place."""
    if not act.to.numel:
        return
    last = acts[-1] if acts else None
    if last is None or (last.total, last.complete, len(last.parts)) != (act.total, act.complete, len(act.parts)):
        acts.append(act)
        return
    pairs = list(zip((last.to, *last.parts), (act.to, *act.parts), strict=True))
    if all(a.leads_to(b) for a, b in pairs):
        to, *parts = (_Span(a.tensor, a.start, b.stop) for a, b in pairs)
        acts[-1] = _Act(to, tuple(parts), act.total, act.complete)
    else:
        acts.append(act)
