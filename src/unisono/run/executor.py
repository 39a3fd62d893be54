"""The loop that moves the data of a schedule over a transport: post a step's messages, wait for each, let them land.

A message of neighbouring chunks leaves from where they lie; one that is only copied, over nothing that this rank sends
in the same step, arrives where it shall lie. Everything else goes through a buffer of the message's size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.run.arithmetic import Arithmetic
from unisono.run.layout import Layout
from unisono.run.plan import Landing, Message, PlanStep, Span
from unisono.run.record import Event, Record
from unisono.transport.base import Transport, Wait

__all__ = ["execute"]


@dataclass(frozen=True, slots=True)
class _Wire:
    """A message in elements: where its chunks lie in the work tensor (None: not in place)."""

    peer: int
    numel: int
    places: tuple[slice, ...]
    first: int
    count: int
    reduce: bool


@dataclass(frozen=True, slots=True)
class _Landing:
    """Parts (message or None for what is there, elements of it), in rank order, into a place in the work tensor."""

    at: slice
    reduce: bool
    parts: tuple[tuple[int | None, slice], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    sends: tuple[_Wire, ...]
    receives: tuple[_Wire, ...]
    landings: tuple[_Landing, ...]
    sums: tuple[tuple[slice, tuple[slice, ...]], ...]


def execute(
    layout: Layout, transport: Transport, work: torch.Tensor, numbers: Arithmetic, record: Record | None = None
) -> None:
    """Runs a plan on its work tensor (flat, `layout.numel` elements of `numbers.carried`), in place.

    `record` is told of both ends of every message. Raises what the transport raises; `work` is then undefined.
    """
    for number, step in enumerate(_compiled(layout)):
        sends = [(wire.peer, _outgoing(work, wire)) for wire in step.sends]
        receives = [(wire.peer, _incoming(work, wire)) for wire in step.receives]
        if sends or receives:
            start = Record.now() if record is not None else 0.0
            waits = transport.post(sends, receives)
            _wait(waits, step, number, record, start, work.itemsize, transport.rank)
        came = [tensor for _, tensor in receives]
        for landing in step.landings:
            here = work[landing.at]
            parts = [here if message is None else came[message][part] for message, part in landing.parts]
            if landing.reduce:
                numbers.combine(parts, here)
            else:
                here.copy_(parts[0])
        for at, contributions in step.sums:
            numbers.total([work[part] for part in contributions], work[at])


def _outgoing(work: torch.Tensor, wire: _Wire) -> torch.Tensor:
    if len(wire.places) == 1:
        return work[wire.places[0]]
    return torch.cat([work[place] for place in wire.places])


def _incoming(work: torch.Tensor, wire: _Wire) -> torch.Tensor:
    return work[wire.places[0]] if wire.places else work.new_empty(wire.numel)


def _wait(
    waits: Sequence[Wait], step: _Step, number: int, record: Record | None, start: float, itemsize: int, rank: int
) -> None:
    """Receives first, for others wait on what comes of them; sends must be done before anything lands."""
    cut = len(step.sends)
    ordered = [*zip(waits[cut:], step.receives, strict=True), *zip(waits[:cut], step.sends, strict=True)]
    for i, (wait, wire) in enumerate(ordered):
        wait()
        if record is not None:
            sent = i >= len(step.receives)
            ends = (rank, wire.peer) if sent else (wire.peer, rank)
            nbytes = float(wire.numel * itemsize)
            event = Event(sent, number, 0, *ends, wire.first, wire.count, start, Record.now(), nbytes, wire.reduce)
            record.events.append(event)


def _compiled(layout: Layout) -> Sequence[_Step]:
    """The plan's steps in elements; kept with the layout."""
    found = layout.compiled.get(execute)
    if found is None:
        found = layout.compiled[execute] = tuple(_compile(layout, step) for step in layout.plan.steps)
    assert isinstance(found, tuple)
    return found


def _compile(layout: Layout, step: PlanStep) -> _Step:
    sends = tuple(_wire(layout, m, tuple(layout.place(s) for s in m.spans), False) for m in step.sends)
    sent = [layout.place(span) for span in step.staged]
    receives: list[_Wire] = []
    offsets: dict[int, tuple[int, list[int]]] = {}
    direct: set[int] = set()
    for message in step.receives:
        mine = [one for one in step.landings if any(part.peer == message.peer for part in one.parts)]
        places = _direct(layout, message, mine, sent, step.landings)
        wire = _wire(layout, message, places, any(one.reduce for one in mine))
        if not wire.numel:
            continue
        if places:
            direct.add(message.peer)
        offsets[message.peer] = (len(receives), _offsets(layout, message))
        receives.append(wire)
    landings = [
        _land(layout, one, offsets)
        for one in step.landings
        if one.parts[0].peer not in direct and layout.length(one.span)
    ]
    c = layout.plan.collective
    sums = [
        tuple(layout.place(Span(j * c.num_chunks + span.chunk, span.count)) for j in range(c.world_size + 1))
        for span in step.sums
    ]
    return _Step(
        tuple(wire for wire in sends if wire.numel),
        tuple(receives),
        tuple(landings),
        tuple((places[-1], places[:-1]) for places in sums),
    )


def _wire(layout: Layout, message: Message, places: tuple[slice, ...], reduce: bool) -> _Wire:
    count = sum(span.count for span in message.spans)
    first = message.spans[0].chunk % layout.plan.collective.num_chunks
    return _Wire(message.peer, sum(map(layout.length, message.spans)), places, first, count, reduce)


def _direct(
    layout: Layout, message: Message, mine: Sequence[Landing], sent: Sequence[slice], landings: Sequence[Landing]
) -> tuple[slice, ...]:
    """Where a message can be received in place, or nothing: it is one copy, over what nothing else touches."""
    if len(message.spans) > 1 or [one.span for one in mine] != [message.spans[0]] or mine[0].reduce:
        return ()
    place = layout.place(message.spans[0])
    others = [layout.place(one.span) for one in landings if one is not mine[0]]
    return () if any(_overlap(place, other) for other in (*sent, *others)) else (place,)


def _overlap(a: slice, b: slice) -> bool:
    return bool(a.start < b.stop and b.start < a.stop)


def _offsets(layout: Layout, message: Message) -> list[int]:
    """Where each chunk of a message begins, and where the last one ends."""
    ends = [0]
    for span in message.spans:
        for length in layout.lengths[span.chunk : span.chunk + span.count]:
            ends.append(ends[-1] + length)
    return ends


def _land(layout: Layout, landing: Landing, offsets: dict[int, tuple[int, list[int]]]) -> _Landing:
    parts: list[tuple[int, int | None, slice]] = []
    for part in landing.parts:
        index, ends = offsets[part.peer]
        parts.append((part.peer, index, slice(ends[part.place], ends[part.place + landing.span.count])))
    at = layout.place(landing.span)
    if landing.reduce:
        parts.append((layout.plan.rank, None, at))
    parts.sort(key=lambda row: row[0])
    return _Landing(at, landing.reduce, tuple((index, part) for _, index, part in parts))
