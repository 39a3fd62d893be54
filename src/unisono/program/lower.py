"""From a schedule to one rank's program: where chunks lie, what is staged where, when ranks meet.

A placement is a policy:

    staged    a rank copies what it sends in a step into its own staging memory; readers take it from there; a meeting
              per step
    mailbox   of two steps, sum then spread: the sum is pushed into the slots of the parts it was made of, which this
              rank alone has read; the second step needs no staging, and reads what was pushed
    put       a rank stores what it sends in a step into the staging memory of every reader; a meeting per step. What
              links between GPUs want: a store goes its way, a load waits for its answer
    direct    nothing is staged: readers go to the peers' tensors. A meeting before (the tensors are there) and one
              after each step; sums are pushed where the mailbox rule holds
    pushed    direct, but the last chunk that a source sends goes by stores of the source: a root that would only wait
              does a part of the work
    messages  over a transport: a message per step and peer

No value is copied without need: chunk c *is* at the input until something lands on it, then at its home. The home of a
complete value is the output, if this rank shall have it at the end; of any other value it is temporary memory.

Every rank lowers by the same arguments, so ranks agree on placements without a word.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from unisono.errors import UsageError, check_known
from unisono.program.plan import Landing, completed, has_mailboxes, landed_before, traffic
from unisono.program.program import PLACEMENTS, Place, Program, Row
from unisono.schedule import Collective, Redistribution, Schedule

__all__ = ["Unfit", "best_staged", "lower"]


class Unfit(UsageError):
    """The schedule cannot be placed like that; `staged` and `messages` always fit."""


def lower(schedule: Schedule, rank: int, placement: str = "staged", deterministic: bool = False) -> Program:
    """The program of ``rank``; cached.

    ``deterministic``: contributions travel apart and are summed at once, in rank order (unreduced.py); without meaning
    where nothing is summed. Raises `Unfit` if the placement does not suit the schedule, UsageError for an unknown
    placement or rank and for a schedule that needs a switch or is a redistribution, ScheduleError as `traffic` does.
    """
    return _lowered(schedule, schedule.name, rank, placement, deterministic)


@lru_cache(maxsize=512)
def _lowered(schedule: Schedule, name: str, rank: int, placement: str, deterministic: bool) -> Program:
    """The same; ``name``: of the schedule, since equal schedules may have different ones."""
    check_known("placement", placement, PLACEMENTS)
    _check(schedule, rank)
    made = _Lowering(schedule, rank, deterministic)
    getattr(made, placement)()
    return made.program(placement)


@lru_cache(maxsize=512)
def best_staged(schedule: Schedule, deterministic: bool = False) -> str:
    """``mailbox`` where the schedule has mailboxes, else ``staged``."""
    return "mailbox" if has_mailboxes(traffic(schedule, deterministic and _sums(schedule.collective))) else "staged"


def _sums(c: Collective) -> bool:
    """True if the order of summation of a collective may matter."""
    return c.reduces and not c.idempotent


def _check(schedule: Schedule, rank: int) -> None:
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


class _Lowering:
    """One rank's program in the making."""

    def __init__(self, schedule: Schedule, rank: int, deterministic: bool) -> None:
        self.schedule, self.rank, self.c = schedule, rank, schedule.collective
        self.n, width = self.c.world_size, self.c.num_chunks
        self.deterministic = deterministic and _sums(self.c)
        self.moves = traffic(schedule, self.deterministic)
        self.landings = [step.landings(rank) for step in self.moves]
        self.slots = tuple(step.busiest for step in self.moves)
        self.rows: list[Row] = []
        self.temps = 0
        self.recvbufs = 0
        first, total = (rank * width, self.n * width) if self.deterministic else (0, 0)
        self.after = {total + chunk: None for chunk in self.c.held_after()[rank].nonzero()[0].tolist()}
        self.complete = completed(schedule) if not self.deterministic else None
        self.where = {first + chunk: Place("in", chunk) for chunk in self.c.held_before()[rank].nonzero()[0].tolist()}
        self.forwarded: set[tuple[int, int]] = set()  # (step, id): a sum that was stored in the slot it is sent from

    def program(self, placement: str) -> Program:
        """The program lowered so far."""
        slots = {"staged": self.slots, "mailbox": self.slots[:1], "put": self.slots}.get(placement, ())
        return Program(
            self.schedule.name, self.c, self.rank, placement, tuple(self.rows), slots, self.temps, self.recvbufs,
            self.deterministic, self._partial(),
        )  # fmt: skip

    def _partial(self) -> bool:
        """True if any rank keeps a partial sum."""
        complete = self.complete
        if complete is None or not _sums(self.c):
            return False
        return any(
            reduce and (step, rank, chunk) not in complete
            for step, moved in enumerate(self.moves)
            for rank, rows in moved.arrivals.items()
            for reduce, chunk, _ in rows
        )

    # Where things are

    def chunk(self, id_: int) -> int:
        """The chunk that an id of the traffic stands for, whoever contributed to it."""
        return id_ % self.c.num_chunks

    def finished(self, step: int, id_: int) -> bool:
        """True if what lands on a chunk in a step is complete: nothing will be added to it."""
        if not _sums(self.c) or self.complete is None:
            return True
        return (step, self.rank, id_) in self.complete

    def home(self, id_: int, complete: bool = True) -> Place:
        """The place that keeps what lands on a chunk."""
        if id_ in self.after and complete:
            return Place("out", self.chunk(id_))
        self.temps += 1
        return Place("temp", self.temps - 1)

    def slot(self, step: int, k: int, rank: int = -1) -> Place:
        """The k-th slot of a step."""
        return Place("stage", sum(self.slots[:step]) + k, -1 if rank == self.rank else rank)

    # Rows

    def copy(self, step: int, id_: int, to: Place, source: Place) -> None:
        """A row, unless there is nothing to do."""
        if to != source:
            self.rows.append(Row("copy", step, self.chunk(id_), (to,), (source,)))

    def sum(self, step: int, id_: int, to: Sequence[Place], parts: Sequence[Place], complete: bool) -> None:
        self.rows.append(Row("sum", step, self.chunk(id_), tuple(to), tuple(parts), complete))

    def meet(self, step: int) -> None:
        self.rows.append(Row("meet", step))

    def keep(self, step: int) -> None:
        """This rank's own blocks that it shall have and no rank brings."""
        landed = {one.chunk for landings in self.landings for one in landings}
        for id_ in self.after:
            if id_ in self.where and id_ not in landed:
                self.copy(step, id_, self.home(id_), self.where[id_])

    def land(
        self,
        step: int,
        part: Callable[[int, int], Place],
        into: Callable[[int], list[Place]] = lambda id_: [],
        placed: Callable[[int, int], Place | None] = lambda peer, id_: None,
        partial_at_home: bool = False,
    ) -> None:
        """The landings of a step.

        ``part(peer, id)``: where a peer's part lies; ``into(id)``: further places for a sum; ``placed(peer, id)``:
        where the part lies already, if nothing is left to do.
        """
        for reduce, id_, peers in sorted(self.landings[step], key=self._distance):
            complete = self.finished(step, id_)
            parts = [(peer, part(peer, id_)) for peer in peers]
            keeps = complete or partial_at_home
            if reduce:
                parts.append((self.rank, self.where[id_]))
                more = into(id_)
                kept = not more or (keeps and id_ in self.after) or self._needed_later(step, id_)
                to = [self.home(id_, keeps), *more] if kept else more
                self.sum(step, id_, to, [place for _, place in sorted(parts, key=lambda p: p[0])], complete)
                self.where[id_] = to[0]
            else:
                home = placed(peers[0], id_)
                if home is None:
                    home = self.home(id_, keeps)
                    self.copy(step, id_, home, parts[0][1])
                self.where[id_] = home
        self._totals(step)

    def _totals(self, step: int) -> None:
        """The sums that are complete after a step, where contributions travel apart."""
        for chunk in self.moves[step].sums.get(self.rank, ()):
            total = self.n * self.c.num_chunks + chunk
            parts, home = [self.where[j * self.c.num_chunks + chunk] for j in range(self.n)], self.home(total)
            self.sum(step, total, [home], parts, True)
            self.where[total] = home

    def _distance(self, one: Landing) -> tuple[bool, int]:
        """Not all at the same peer at a time."""
        return one.reduce, (one.peers[0] - self.rank) % self.n

    def sent(self, step: int) -> list[int]:
        """What this rank sends in a step; the k-th is staged in the k-th slot."""
        return self.moves[step].staged.get(self.rank, [])

    def sources(self, step: int) -> set[int]:
        """The ranks from which something arrives in a step."""
        return {peer for one in self.landings[step] for peer in one.peers}

    # Placements

    def staged(self) -> None:
        numbers = [
            {peer: _numbers(moved.staged.get(peer, [])) for peer in (*self.sources(step), self.rank)}
            for step, moved in enumerate(self.moves)
        ]

        def own_slot(step: int, id_: int) -> list[Place]:
            return [self.slot(step, numbers[step][self.rank][id_])] if id_ in numbers[step][self.rank] else []

        self._by_steps(own_slot, lambda step, peer, id_: self.slot(step, numbers[step][peer][id_], peer))

    def put(self) -> None:
        numbers = [step.arrival_slots() for step in self.moves]
        self.slots = tuple(max(map(len, arrived.values()), default=0) for arrived in numbers)

        def slots_of_readers(step: int, id_: int) -> list[Place]:
            found = self.moves[step].readers(self.rank).get(id_, ())
            return [self.slot(step, numbers[step][peer][self.rank, id_], peer) for peer in found]

        self._by_steps(slots_of_readers, lambda step, peer, id_: self.slot(step, numbers[step][self.rank][peer, id_]))

    def _by_steps(self, laid: Callable[[int, int], list[Place]], part: Callable[[int, int, int], Place]) -> None:
        """A meeting per step. ``laid(step, id)``: where readers find what this rank sends of an id, nowhere if it does
        not; a sum is stored there at once. ``part(step, peer, id)``: where this rank finds it.
        """

        def forward(step: int, id_: int) -> list[Place]:
            places = laid(step, id_) if step < len(self.moves) else []
            self.forwarded.update([(step, id_)] if places else [])
            return places

        for step in range(len(self.moves)):
            for id_ in self.sent(step):
                for place in laid(step, id_) if (step, id_) not in self.forwarded else ():
                    self.copy(step, id_, place, self.where[id_])
            if step == 0:
                self.keep(0)  # while its lines are warm
            self.meet(step)
            self.land(step, partial(part, step), partial(forward, step + 1))
        if not self.moves:
            self.meet(0)
            self.keep(0)

    def _needed_later(self, step: int, id_: int) -> bool:
        """True if this rank reads the sum of a step again, apart from the slot that it is forwarded to."""
        for later in range(step + 1, len(self.moves)):
            if later > step + 1 and id_ in self.sent(later):
                return True
            landing = [one.reduce for one in self.landings[later] if one.chunk == id_]
            if landing:
                return any(landing)
        return False

    def mailbox(self) -> None:
        if not has_mailboxes(self.moves):
            raise Unfit(f"{self.schedule.name} {self.c.name} has no sum that could be pushed: staged")
        first = {rank: _numbers(ids) for rank, ids in self.moves[0].staged.items()}
        spread = self.moves[1].readers(self.rank)
        for k, id_ in enumerate(self.sent(0)):
            self.copy(0, id_, self.slot(0, k), self.where[id_])
        self.meet(0)
        self.land(
            0,
            lambda peer, id_: self.slot(0, first[peer][id_], peer),
            lambda id_: [self.slot(0, first[peer][id_], peer) for peer in spread.get(id_, ())],
        )
        self.meet(1)
        for _, id_, _ in self.landings[1]:
            self.copy(1, id_, self.home(id_), self.slot(0, first[self.rank][id_]))

    def direct(self) -> None:
        self._direct(lambda source, peer, id_: False)

    def pushed(self) -> None:
        last = {
            (src, dst): chunks[-1]
            for step in self.moves
            for src, to in step.messages.items()
            for dst, chunks in to.items()
        }
        if len(self.moves) != 1 or self.c.name != "broadcast" or self.c.num_chunks < 2:
            raise Unfit(f"{self.schedule.name} {self.c.name} is no broadcast of one step and several chunks: direct")
        self._direct(lambda source, peer, id_: last.get((source, peer)) == id_)

    def _direct(self, stored: Callable[[int, int, int], bool]) -> None:
        """``stored(source, peer, id)``: whether the source itself stores it in the peer's output."""
        if self.deterministic:
            raise Unfit("contributions that travel apart are kept in memory that is not mapped: staged")
        mailboxes = has_mailboxes(self.moves)
        if mailboxes and self.c.name not in ("all_reduce", "barrier"):
            raise Unfit("sums are pushed into outputs, which peers offer only where they are inputs as well: staged")
        landed = landed_before(self.moves)
        if not mailboxes:
            self._check_direct()
        spread = self.moves[1].readers(self.rank) if mailboxes else {}

        def part(step: int, peer: int, id_: int) -> Place:
            return Place("out" if id_ in landed[step].get(peer, ()) else "in", id_, peer)

        self.meet(0)
        self.keep(0)
        for step, moved in enumerate(self.moves[:1] if mailboxes else self.moves):
            for peer, chunks in moved.messages.get(self.rank, {}).items():
                for id_ in (id_ for id_ in chunks if stored(self.rank, peer, id_)):
                    self.copy(step, id_, Place("out", id_, peer), self.where[id_])
            self.land(
                step,
                partial(part, step),
                lambda id_: [Place("out", id_, peer) for peer in spread.get(id_, ())],
                lambda peer, id_: Place("out", id_) if stored(peer, self.rank, id_) else None,
                partial_at_home=True,
            )
            self.meet(step + 1)
        if not self.moves:
            self.meet(1)

    def _check_direct(self) -> None:
        """Raises `Unfit` if a rank would read what its owner overwrites, or has in memory that is not mapped."""
        held = self.c.held_after()
        for step in self.moves:
            lands = {rank: {chunk for _, chunk, _ in rows} for rank, rows in step.arrivals.items()}
            for source, chunks in step.staged.items():
                if lands.get(source, set()).intersection(chunks):
                    raise Unfit(f"{self.schedule.name} {self.c.name} overwrites what is read in the same step: staged")
            for rank, landed in lands.items():
                if not all(held[rank, chunk] for chunk in landed):
                    raise Unfit(
                        f"{self.schedule.name} {self.c.name} passes chunks on that a rank does not keep: staged"
                    )

    def messages(self) -> None:
        """A message per step and peer, packed where its chunks do not lie together; landings from the buffers."""
        for step, moved in enumerate(self.moves):
            sends = moved.messages.get(self.rank, {})
            for peer in sorted(sends, key=lambda peer: (peer < self.rank, peer)):
                for id_ in sends[peer]:
                    self.rows.append(Row("send", step, self.chunk(id_), parts=(self.where[id_],), peer=peer))
            sent = {self.chunk(id_) for id_ in self.sent(step)}  # of an input that may be the output as well
            landed = [one.chunk for one in self.landings[step]]
            copied = {one.chunk for one in self.landings[step] if not one.reduce}
            buffers: dict[tuple[int, int], Place] = {}
            in_place: dict[int, Place] = {}
            for peer in sorted(self.sources(step), key=lambda peer: (peer > self.rank, -peer)):
                for id_ in moved.messages[peer][self.rank]:
                    to = buffers[peer, id_] = Place("recvbuf", self.recvbufs)
                    if id_ in copied and self.chunk(id_) not in sent and landed.count(id_) == 1:
                        # it is copied over what nothing else in this step touches
                        to = in_place[id_] = self.home(id_, self.finished(step, id_))
                    self.rows.append(Row("recv", step, self.chunk(id_), to=(to,), peer=peer))
                    self.recvbufs += 1
            if step == 0:
                self.keep(0)
            self.rows.append(Row("wait", step))
            self.land(
                step,
                lambda peer, id_, buffers=buffers: buffers[peer, id_],  # type: ignore[misc]
                placed=lambda peer, id_, arrived=in_place: arrived.get(id_),  # type: ignore[misc]
            )
        if not self.moves:
            self.keep(0)


def _numbers(ids: Sequence[int]) -> dict[int, int]:
    return {id_: k for k, id_ in enumerate(ids)}
