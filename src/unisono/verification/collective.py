"""The proof of a collective's schedule: every contribution followed to the end.

Every chunk is followed symbolically as a multiset of contributions (schedule.state). The findings:

    range       a transfer names a rank or chunk that does not exist, moves no chunk, or goes from a rank to itself
    empty       a rank sends, or reduces into, a chunk of which it holds nothing
    race        a copy lands in a chunk that another transfer of the same step writes or reads
    lost        after the last step, a rank that must hold a chunk lacks a rank's contribution to it
    twice       after the last step, a rank's contribution is in the sum more than once (in a barrier it may be)
    deadlock    ranks wait for each other for ever under the given number of messages in flight
    in_place    with one buffer for input and output, a block arrives over one that has yet to be sent

and two notes, which are no defects (compositions such as gather then broadcast have them):

    redundant   a copy brings what is there already
    unused      nothing that a rank must hold at the end depends on a transfer

**Race.** A transfer carries what its source held when the step began. Programs (program/plan.py) keep that promise
for reductions by applying them after the rank's own reads of the step, so an exchange (each sends what the other
reduces into) is sound, and several reductions may meet in one chunk. A copy may be received straight into place,
perhaps while another rank still reads, so nothing else in the step may touch the chunk it overwrites.

**Deadlock.** Each rank takes the steps in order: in a step it first sends its messages (all transfers to one peer are
one message), then receives. A send waits while `in_flight` of the rank's messages are under way, a receive until its
message is there; a message is under way until it is received. With in_flight = 0 a send waits for its receive. If
in_flight is at least the number of messages a rank sends in one step, no rank ever waits for ever: a rank that is in
the earliest step has nothing older under way, and all that it awaits has been or can be sent. `Report.in_flight` is
that number, and what verify assumes if it is given none.

**In place.** Input and output of most collectives are the same chunks of one buffer. Those of all_to_all are not: block
d of the input leaves for rank d, and block d of the output comes from it. `Report.in_place` says whether one buffer
serves for both.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.schedule import Schedule, Step
from unisono.schedule.picture import life_of_chunk
from unisono.schedule.progress import busiest_sender, find_deadlock
from unisono.schedule.state import State, Units, lineage, well_formed
from unisono.units import show_count, show_spans
from unisono.verification.report import Finding, Report

__all__ = ["KINDS", "check_collective"]

KINDS = ("range", "empty", "race", "lost", "twice", "deadlock", "in_place")
_NOTES = ("redundant", "unused")

_LIMIT = 1 << 26  # contributions followed at once, two bytes each


def check_collective(schedule: Schedule, in_flight: int | None, in_place: bool) -> Report:
    """All findings about a schedule. Raises UsageError if it is too large to follow every contribution."""
    c = schedule.collective
    if c.world_size**2 * c.num_chunks > _LIMIT:
        raise UsageError(
            f"{schedule.name} {c.name} over {c.world_size} ranks with {c.num_chunks} chunks is too large to prove "
            f"contribution by contribution: verify it at fewer ranks"
        )
    if in_flight is not None and in_flight < 0:
        raise UsageError(f"in_flight must be at least 0, got {in_flight}")
    return _Proof(schedule).report(in_flight, in_place)


class _Proof:
    """The working data of one verification."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.steps: tuple[Step, ...] = tuple(schedule.explicit_steps())
        self.findings: list[Finding] = []
        self.units = [Units.of(schedule, step) for step in self.steps]
        self.notes: list[Finding] = []

    def report(self, in_flight: int | None, in_place: bool) -> Report:
        state = State(self.schedule.collective, self.schedule.switches)
        for i, (step, units) in enumerate(zip(self.steps, self.units, strict=True)):
            self._range(i, step)
            self._race(i, units)
            self._empty(i, units, state)
            self._redundant(i, units, state)
            state.apply(units)
        self._postcondition(state)
        self._unused()
        needed = busiest_sender(self.steps)
        if in_flight is not None and in_flight < needed:
            self._deadlock(in_flight)
        clashes = self._clashes_in_place()
        if in_place:
            self.findings += clashes
        c, found = self.schedule.collective, sorted(self.findings, key=lambda f: f.step)
        ranks, steps = show_count(c.world_size, "rank"), show_count(self.schedule.num_steps, "step")
        subject = f"{self.schedule.name} {c.name} over {ranks}, {steps}"
        return Report(self.schedule, tuple(found), subject, needed, not clashes, tuple(self.notes))

    def _add(self, kind: str, message: str, at: tuple[int, int], chunk: int, steps: Iterable[int], note: str) -> None:
        """A finding at (step, rank), drawn as the life of a chunk in some steps; or a note."""
        shown = tuple(sorted(set(steps)))
        found = Finding(kind, message, life_of_chunk(self.schedule, chunk, shown, at, note), at[0], shown)
        (self.notes if kind in _NOTES else self.findings).append(found)

    def _range(self, i: int, step: Step) -> None:
        c, nodes = self.schedule.collective, self.schedule.world_size + self.schedule.switches
        bad = ~well_formed(self.schedule, step)
        for t in (t for t, is_bad in zip(step, bad, strict=True) if is_bad):
            reasons = [f"there is no rank {r}" for r in (t.src, t.dst) if not 0 <= r < nodes]
            if t.count < 1:
                reasons.append("it moves no chunk")
            elif t.chunk < 0 or t.chunk + t.count > c.num_chunks:
                reasons.append(f"chunks run from 0 to {c.num_chunks - 1}")
            if t.src == t.dst:
                reasons.append("a rank needs no message to itself")
            line = f"step {i}: {t}"
            arrow = " " * (len(line) - len(str(t))) + "^ " + "; ".join(reasons)
            message = f"step {i}: transfer {t}: {'; '.join(reasons)}"
            self.findings.append(Finding("range", message, f"{line}\n{arrow}", i, (i,)))

    def _race(self, i: int, units: Units) -> None:
        width = self.schedule.collective.num_chunks
        written, read = units.dst * width + units.chunk, units.src * width + units.chunk
        cells, times = np.unique(written, return_counts=True)
        copied = np.unique(written[~units.reduce])
        written_twice = np.intersect1d(copied, cells[times > 1])
        for cells_, why in ((written_twice, "written twice"), (np.intersect1d(copied, read), "read while overwritten")):
            for rank, chunks in _by_rank(cells_, width):
                message = (
                    f"step {i}: {_chunks(chunks)} at rank {rank} {_is(chunks)} {why}: "
                    f"{self._transfers(i, units, rank, chunks[0], why == 'written twice')}"
                )
                before = lineage(self.steps[:i], rank, chunks[0])
                self._add("race", message, (i, rank), chunks[0], [*before, i], why)

    def _transfers(self, i: int, units: Units, rank: int, chunk: int, writes_only: bool) -> str:
        touching = (units.chunk == chunk) & ((units.dst == rank) | ((units.src == rank) & (not writes_only)))
        step = list(self.steps[i])
        return ", ".join(str(step[t]) for t in units.transfer[touching])

    def _empty(self, i: int, units: Units, state: State) -> None:
        width = self.schedule.collective.num_chunks
        sends = ~state.counts[units.src, units.chunk].any(axis=1)
        bare = ~state.counts[units.dst, units.chunk].any(axis=1)
        lands = units.reduce & bare & (units.dst < self.schedule.world_size)
        for rank, chunks in _by_rank((units.src * width + units.chunk)[sends], width):
            message = f"step {i}: rank {rank} sends {_chunks(chunks)} but holds nothing of it"
            self._add("empty", message, (i, rank), chunks[0], [i], "nothing to send")
        for rank, chunks in _by_rank((units.dst * width + units.chunk)[lands], width):
            message = f"step {i}: {_chunks(chunks)} {_is(chunks)} reduced into rank {rank}, which holds nothing of it"
            self._add("empty", message, (i, rank), chunks[0], [i], "nothing to reduce into")

    def _redundant(self, i: int, units: Units, state: State) -> None:
        width = self.schedule.collective.num_chunks
        brought, there = state.counts[units.src, units.chunk], state.counts[units.dst, units.chunk]
        same = ~units.reduce & brought.any(axis=1) & (brought == there).all(axis=1)
        for rank, chunks in _by_rank((units.dst * width + units.chunk)[same], width):
            message = f"step {i}: {_chunks(chunks)} {_is(chunks)} copied to rank {rank}, which holds just that already"
            steps = [*lineage(self.steps[:i], rank, chunks[0]), i]
            self._add("redundant", message, (i, rank), chunks[0], steps, "nothing new")

    def _unused(self) -> None:
        c = self.schedule.collective
        needed = np.zeros((c.world_size + self.schedule.switches, c.num_chunks), dtype=np.bool_)
        needed[: c.world_size] = c.held_after()
        for i in range(len(self.steps) - 1, -1, -1):
            units = self.units[i]
            live = needed[units.dst, units.chunk]
            for rank, chunks in _by_rank((units.dst * c.num_chunks + units.chunk)[~live], c.num_chunks):
                message = f"step {i}: {_chunks(chunks)} {_is(chunks)} sent to rank {rank}, but nothing comes of it"
                self._add("unused", message, (i, rank), chunks[0], [i], "unused")
            copies = ~units.reduce
            needed[units.dst[copies], units.chunk[copies]] = False
            needed[units.src[live], units.chunk[live]] = True

    def _postcondition(self, state: State) -> None:
        c = self.schedule.collective
        expected = c.held_before().T.astype(np.int16)
        counts, must = state.counts[: c.world_size], c.held_after()
        wrong = {"lost": (counts < expected) & must[:, :, None]}
        if not c.idempotent:
            wrong["twice"] = (counts > expected) & must[:, :, None]
        for kind, where in wrong.items():
            alike: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
            for chunk in np.flatnonzero(where.any(axis=(0, 2))):
                ranks = tuple(int(r) for r in np.flatnonzero(where[:, chunk].any(axis=1)))
                alike.setdefault((ranks, where[:, chunk].tobytes()), []).append(int(chunk))
            for (ranks, _), chunks in alike.items():
                owners = [int(x) for x in np.flatnonzero(where[ranks[0], chunks[0]])]
                (self._lost if kind == "lost" else self._twice)(list(ranks), chunks, owners)

    def _lost(self, ranks: list[int], chunks: list[int], owners: list[int]) -> None:
        chunk, rank, end = chunks[0], ranks[0], len(self.steps)
        shown = lineage(self.steps, rank, chunk)
        message = f"{_chunks(chunks)}: the contribution of {_ranks(owners)} is missing at {_ranks(ranks)} at the end"
        overwritten = self._overwritten(chunk, owners[0])
        if overwritten is None:
            self._add("lost", message, (end, rank), chunk, shown, f"without {show_spans(owners)}")
        else:
            step, at = overwritten
            message += f"; step {step} overwrites it at rank {at}"
            before = lineage(self.steps[:step], at, chunk)
            self._add("lost", message, (step, at), chunk, [*shown, *before, step], f"{owners[0]} is overwritten")

    def _overwritten(self, chunk: int, owner: int) -> tuple[int, int] | None:
        """(step, rank) where the last copy of a rank's contribution vanishes under a copy without it."""
        state, last = State(self.schedule.collective, self.schedule.switches, [chunk]), None
        for i, units in enumerate(self.units):
            had = state.counts[:, 0, owner] > 0
            state.apply(units)
            gone = np.flatnonzero(had & (state.counts[:, 0, owner] == 0))
            if len(gone) and not state.counts[:, 0, owner].any():
                last = (i, int(gone[0]))
        return last

    def _twice(self, ranks: list[int], chunks: list[int], owners: list[int]) -> None:
        chunk, rank = chunks[0], ranks[0]
        shown = lineage(self.steps, rank, chunk)
        state = State(self.schedule.collective, self.schedule.switches, [chunk])
        at = (len(self.steps), rank)
        for i, units in enumerate(self.units):
            state.apply(units)
            doubled = [t.dst for t in shown.get(i, []) if state.at(t.dst, chunk)[owners].max() > 1]
            if doubled:
                at = (i, doubled[0])
                break
        steps = lineage(self.steps[: at[0] + 1], at[1], chunk)
        message = (
            f"{_chunks(chunks)}: the contribution of {_ranks(owners)} counts more than once at {_ranks(ranks)} "
            f"at the end; it first does after step {at[0]} at rank {at[1]}"
        )
        self._add("twice", message, at, chunk, steps, f"{show_spans(owners)} twice")

    def _deadlock(self, in_flight: int) -> None:
        cycle = find_deadlock(self.steps, in_flight)
        if cycle:
            ranks = [wait.rank for wait in cycle]
            around = " -> ".join(map(str, [*ranks, ranks[0]]))
            most = show_count(in_flight, "message")
            message = f"with {most} in flight per rank, ranks wait for each other for ever: {around}"
            steps = tuple(sorted({wait.step for wait in cycle}))
            lines = [str(wait) for wait in cycle]
            arrow = f"{' ' * lines[-1].rindex('rank')}^ and so round again"
            self.findings.append(Finding("deadlock", message, "\n".join([*lines, arrow]), steps[0], steps))

    def _clashes_in_place(self) -> list[Finding]:
        """all_to_all with one buffer: blocks that arrive over a block that leaves in a later step."""
        c = self.schedule.collective
        if c.name != "all_to_all":
            return []
        last_sent = np.full((c.world_size, c.num_chunks), -1)
        for i, units in enumerate(self.units):
            ranks = units.src < c.world_size
            last_sent[units.src[ranks], units.chunk[ranks]] = i
        source, goal = np.divmod(np.arange(c.num_chunks) // c.pieces, c.world_size)
        piece = np.arange(c.num_chunks) % c.pieces
        leaving = (goal * c.world_size + source) * c.pieces + piece  # the chunk of the input in the same place
        found = []
        for i, units in enumerate(self.units):
            home = units.dst == goal[units.chunk]
            clash = home & (last_sent[units.dst % c.world_size, leaving[units.chunk]] > i)
            for rank, chunks in _by_rank((units.dst * c.num_chunks + units.chunk)[clash], c.num_chunks):
                later = int(last_sent[rank, leaving[chunks[0]]])
                message = (
                    f"step {i}: {_chunks(chunks)} arrives at rank {rank} over {_chunks([int(leaving[chunks[0]])])}, "
                    f"which leaves in step {later}"
                )
                picture = life_of_chunk(self.schedule, chunks[0], [i], (i, rank), "arrives too early")
                found.append(Finding("in_place", message, picture, i, (i, later)))
        return found


def _by_rank(cells: NDArray[np.int64], width: int) -> Iterator[tuple[int, list[int]]]:
    """Cells rank * width + chunk as (rank, its chunks), in order."""
    unique = np.unique(cells) if len(cells) else cells
    for rank in np.unique(unique // width):
        yield int(rank), [int(c) for c in unique[unique // width == rank] % width]


def _chunks(chunks: Sequence[int]) -> str:
    return f"chunk{'s' * (len(chunks) > 1)} {show_spans(chunks)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {show_spans(ranks)}"


def _is(chunks: Sequence[int]) -> str:
    return "is" if len(chunks) == 1 else "are"
