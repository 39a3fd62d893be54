"""One rank's share of a schedule: what it sends, receives and does with what came. Derived, never written by hand.

All transfers of a step from one rank to another are one message: the chunks that any of them names, each once, in
order. A rank posts every message of a step before it waits for any, so that no order of messages can deadlock; they are
listed by distance around the circle of ranks, so that not every rank turns to rank 0 first. Messages and stagings are
read before anything of the step is written (`Schedule`'s rule: a transfer carries what its source held when the step
began); then the *landings* take effect, copies first. The reductions that meet in one chunk are combined with what is
there **in rank order**, so that ranks that sum the same parts in one step get the same bits.

For shared memory a rank *stages* every chunk that it sends in a step once, however many ranks read it; `Part.slot` says
where among the staged chunks of its source a part lies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError, UsageError
from unisono.program.unreduced import Unit, unreduced
from unisono.schedule import Collective, Redistribution, Schedule
from unisono.schedule.state import Units, well_formed
from unisono.units import consecutive

__all__ = ["Landing", "Message", "Part", "Plan", "PlanStep", "Span", "Traffic", "plan", "traffic"]


@dataclass(frozen=True, slots=True)
class Span:
    """Chunks chunk .. chunk+count-1."""

    chunk: int
    count: int


@dataclass(frozen=True, slots=True)
class Message:
    """The message to, or from, one peer in one step: these chunks, one after the other."""

    peer: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks from one peer: from the `place`-th chunk of its message on, the `slot`-th of those it staged."""

    peer: int
    place: int
    slot: int


@dataclass(frozen=True, slots=True)
class Landing:
    """The use of parts that arrived: copied over (one part), or reduced into, the chunks of `span`."""

    span: Span
    parts: tuple[Part, ...]
    reduce: bool


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One rank's part in a step; after the landings, all contributions to the chunks of `sums` (0 .. C-1) are there."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    staged: tuple[Span, ...] = ()
    landings: tuple[Landing, ...] = ()
    sums: tuple[Span, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's share of a schedule.

    Chunk ids are the schedule's. In a deterministic plan of a collective that sums, with C chunks and n ranks, id
    j * C + c is rank j's contribution to chunk c and n * C + c is its sum; `sums` tells when to add up. `before`,
    `after`: the ids that the rank contributes, and those that it shall have.
    """

    name: str
    collective: Collective
    rank: int
    deterministic: bool
    steps: tuple[PlanStep, ...]
    before: tuple[int, ...] = field(repr=False)
    after: tuple[int, ...] = field(repr=False)


@lru_cache(maxsize=512)
def plan(schedule: Schedule, rank: int, deterministic: bool = False) -> Plan:
    """The share of `rank` in a schedule; cached.

    `deterministic`: contributions travel unreduced and are summed in rank order where the schedule completes the sum
    (see unreduced.py); without meaning where nothing is summed. Raises UsageError if there is no such rank, the
    schedule needs a switch or is a redistribution, ScheduleError if a transfer names ranks or chunks that do not exist
    or are not held.
    """
    c = schedule.collective
    if schedule.switches:
        raise UsageError(
            f"{schedule.name} {c.name} needs a switch that sums: it can be simulated, not run; choose another algorithm"
        )
    if isinstance(c, Redistribution):
        raise UsageError(
            f"{schedule.name} is a redistribution, whose chunks are parts of named tensors and have no program: "
            "unisono.weights runs it"
        )
    if not 0 <= rank < c.world_size:
        raise UsageError(f"{schedule.name} {c.name} over {c.world_size} ranks has no rank {rank}")
    deterministic = deterministic and c.reduces and not c.idempotent
    moves = traffic(schedule, deterministic)
    steps = tuple(_share(step, rank) for step in moves)
    before = _ids(c.held_before()[rank], rank * c.num_chunks if deterministic else 0)
    after = _ids(c.held_after()[rank], c.world_size * c.num_chunks if deterministic else 0)
    return Plan(schedule.name, c, rank, deterministic, steps, before, after)


def _ids(held: NDArray[np.bool_], offset: int) -> tuple[int, ...]:
    return tuple(int(chunk) + offset for chunk in np.flatnonzero(held))


@dataclass(frozen=True, slots=True)
class Traffic:
    """A step of all ranks: chunks by sender and receiver, what lands (reduce, chunk, sender) by receiver; sorted."""

    messages: dict[int, dict[int, list[int]]]
    arrivals: dict[int, list[tuple[bool, int, int]]]
    staged: dict[int, list[int]]
    sums: dict[int, list[int]]

    @property
    def busiest(self) -> int:
        """The most chunks that a rank stages."""
        return max(map(len, self.staged.values()), default=0)


@lru_cache(maxsize=32)
def traffic(schedule: Schedule, deterministic: bool) -> tuple[Traffic, ...]:
    """The source of all ranks' plans; cached, since ranks may be threads of one process."""
    rows = _checked(schedule)
    steps = unreduced(schedule, rows) if deterministic else ((step, []) for step in rows)
    return tuple(_sorted_out(units, sums) for units, sums in steps)


def _checked(schedule: Schedule) -> Iterator[list[Unit]]:
    before = schedule.collective.held_before()
    held = np.vstack(
        [before, np.ones((schedule.switches, before.shape[1]), dtype=np.bool_)]
    )  # a switch sums what comes
    for number, step in enumerate(schedule.explicit_steps()):
        if not well_formed(schedule, step).all():
            raise ScheduleError(
                f"step {number} of {schedule.name} names ranks or chunks that do not exist: verify() shows which"
            )
        units = Units.of(schedule, step)
        _check_held(f"step {number} of {schedule.name} sends", held, units.src, units.chunk)
        copies = units.only(~units.reduce)
        held[copies.dst, copies.chunk] = True
        sums = units.only(units.reduce)
        _check_held(f"step {number} of {schedule.name} reduces into", held, sums.dst, sums.chunk)
        yield list(
            zip(units.src.tolist(), units.dst.tolist(), units.chunk.tolist(), units.reduce.tolist(), strict=True)
        )


def _check_held(what: str, held: NDArray[np.bool_], ranks: NDArray[np.int64], chunks: NDArray[np.int64]) -> None:
    lacking = np.flatnonzero(~held[ranks, chunks])
    if lacking.size:
        rank, chunk = ranks[lacking[0]], chunks[lacking[0]]
        raise ScheduleError(f"{what} chunk {chunk} at rank {rank}, which holds nothing of it: verify() shows where")


def _sorted_out(units: list[Unit], sums: Sequence[tuple[int, int]]) -> Traffic:
    messages: dict[int, dict[int, set[int]]] = {}
    arrivals: dict[int, list[tuple[bool, int, int]]] = {}
    for src, dst, chunk, reduce in units:
        messages.setdefault(src, {}).setdefault(dst, set()).add(chunk)
        arrivals.setdefault(dst, []).append((reduce, chunk, src))
    complete: dict[int, list[int]] = {}
    for rank, chunk in sums:
        complete.setdefault(rank, []).append(chunk)
    return Traffic(
        {src: {dst: sorted(chunks) for dst, chunks in to.items()} for src, to in messages.items()},
        {dst: sorted(rows) for dst, rows in arrivals.items()},
        {src: sorted(set().union(*to.values())) for src, to in messages.items()},
        {rank: sorted(chunks) for rank, chunks in complete.items()},
    )


def _share(step: Traffic, rank: int) -> PlanStep:
    sends, arrivals = step.messages.get(rank, {}), step.arrivals.get(rank, [])
    sources = sorted({src for _, _, src in arrivals}, key=lambda peer: (peer > rank, -peer))
    targets = sorted(sends, key=lambda peer: (peer < rank, peer))
    places = {src: {chunk: i for i, chunk in enumerate(step.messages[src][rank])} for src in sources}
    slots = {src: {chunk: i for i, chunk in enumerate(step.staged[src])} for src in sources}
    return PlanStep(
        tuple(Message(peer, _spans(sends[peer])) for peer in targets),
        tuple(Message(peer, _spans(step.messages[peer][rank])) for peer in sources),
        _spans(step.staged.get(rank, [])),
        tuple(_landings(arrivals, places, slots)),
        _spans(step.sums.get(rank, [])),
    )


def _landings(
    arrivals: list[tuple[bool, int, int]], places: dict[int, dict[int, int]], slots: dict[int, dict[int, int]]
) -> list[Landing]:
    """Copies, then reductions, chunk by chunk; neighbours that come from the same peers are one landing."""
    found: list[Landing] = []
    for (reduce, chunk), group in groupby(arrivals, key=lambda row: row[:2]):
        parts = tuple(Part(peer, places[peer][chunk], slots[peer][chunk]) for _, _, peer in group)
        last = found[-1] if found else None
        if last is not None and _continues(last, chunk, reduce, parts):
            found[-1] = Landing(Span(last.span.chunk, last.span.count + 1), last.parts, reduce)
        elif reduce:
            found.append(Landing(Span(chunk, 1), parts, True))
        else:
            found += [Landing(Span(chunk, 1), (part,), False) for part in parts]
    return found


def _continues(last: Landing, chunk: int, reduce: bool, parts: tuple[Part, ...]) -> bool:
    k = last.span.count
    if last.reduce != reduce or last.span.chunk + k != chunk or len(last.parts) != len(parts):
        return False
    pairs = zip(last.parts, parts, strict=True)
    return all(b == Part(a.peer, a.place + k, a.slot + k) for a, b in pairs)


def _spans(ids: Sequence[int]) -> tuple[Span, ...]:
    """Runs of neighbours in sorted ids."""
    return tuple(Span(run[0], len(run)) for run in consecutive(ids))
