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

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from unisono.errors import UsageError, check_known
from unisono.program.moves import arrival_slots, completed, has_mailboxes, landed_before, readers
from unisono.program.plan import Landing, Span, plan, traffic
from unisono.program.program import PLACEMENTS, Place, Program, Row, in_, out, recvbuf, stage, temp
from unisono.schedule import Schedule

__all__ = ["Unfit", "best_staged", "lower"]


class Unfit(UsageError):
    """The schedule cannot be placed like that; `staged` and `messages` always fit."""


@lru_cache(maxsize=512)
def lower(schedule: Schedule, rank: int, placement: str = "staged", deterministic: bool = False) -> Program:
    """The program of ``rank``; cached.

    ``deterministic``: contributions travel apart and are summed at once, in rank order (unreduced.py). Raises `Unfit`
    if the placement does not suit the schedule, UsageError for an unknown placement and for what `plan` refuses.
    """
    check_known("placement", placement, PLACEMENTS)
    made = _Lowering(schedule, rank, deterministic)
    getattr(made, placement)()
    return made.program(placement)


@lru_cache(maxsize=512)
def best_staged(schedule: Schedule, deterministic: bool = False) -> str:
    """``mailbox`` where the schedule has mailboxes, else ``staged``."""
    c = schedule.collective
    unreduced = deterministic and c.reduces and not c.idempotent
    return "mailbox" if has_mailboxes(traffic(schedule, unreduced)) else "staged"


def _ids(spans: Iterable[Span]) -> list[int]:
    return [chunk for span in spans for chunk in range(span.chunk, span.chunk + span.count)]


class _Lowering:
    """One rank's program in the making."""

    def __init__(self, schedule: Schedule, rank: int, deterministic: bool) -> None:
        self.plan = plan(schedule, rank, deterministic)
        self.moves = traffic(schedule, self.plan.deterministic)
        self.schedule, self.rank, self.c = schedule, rank, schedule.collective
        self.n = self.c.world_size
        self.slots = tuple(step.busiest for step in self.moves)
        self.rows: list[Row] = []
        self.temps = 0
        self.recvbufs = 0
        self.after = set(self.plan.after)
        self.complete = completed(schedule) if not self.plan.deterministic else None
        self.where = {id_: in_(self.chunk(id_)) for id_ in self.plan.before}
        self.forwarded: set[tuple[int, int]] = set()  # (step, id): a sum that was stored in the slot it is sent from

    def program(self, placement: str) -> Program:
        """The program lowered so far."""
        slots = {"staged": self.slots, "mailbox": self.slots[:1], "put": self.slots}.get(placement, ())
        rows, temps, deterministic = tuple(self.rows), self.temps, self.plan.deterministic
        return Program(
            self.plan.name, self.c, self.rank, placement, rows, slots, temps, self.recvbufs, deterministic,
            self._partial(),
        )  # fmt: skip

    def _partial(self) -> bool:
        """True if any rank keeps a partial sum."""
        complete = self.complete
        if complete is None or not self.c.reduces or self.c.idempotent:
            return False
        return any(
            reduce and (step, rank, chunk) not in complete
            for step, moved in enumerate(self.moves)
            for rank, rows in moved.arrivals.items()
            for reduce, chunk, _ in rows
        )

    # Where things are

    def chunk(self, id_: int) -> int:
        """The chunk that an id of the plan stands for, whoever contributed to it."""
        return id_ % self.c.num_chunks

    def finished(self, step: int, id_: int) -> bool:
        """True if what lands on a chunk in a step is complete: nothing will be added to it."""
        if not self.c.reduces or self.c.idempotent or self.complete is None:
            return True
        return (step, self.rank, id_) in self.complete

    def home(self, id_: int, complete: bool = True) -> Place:
        """The place that keeps what lands on a chunk."""
        if id_ in self.after and complete:
            return out(self.chunk(id_))
        self.temps += 1
        return temp(self.temps - 1)

    def slot(self, step: int, k: int, rank: int = -1) -> Place:
        """The k-th slot of a step."""
        return stage(sum(self.slots[:step]) + k, -1 if rank == self.rank else rank)

    # Rows

    def copy(self, step: int, id_: int, to: Place, source: Place) -> None:
        """A row, unless there is nothing to do."""
        if to != source:
            self.rows.append(Row("copy", step, self.chunk(id_), (to,), (source,)))

    def sum(self, step: int, id_: int, to: Sequence[Place], parts: Sequence[Place], complete: bool) -> None:
        """A row."""
        self.rows.append(Row("sum", step, self.chunk(id_), tuple(to), tuple(parts), complete))

    def meet(self, step: int) -> None:
        """A row."""
        self.rows.append(Row("meet", step))

    def keep(self, step: int) -> None:
        """This rank's own blocks that it shall have and no rank brings."""
        landed = {id_ for moved in self.plan.steps for one in moved.landings for id_ in _ids([one.span])}
        for id_ in self.plan.after:
            if id_ in self.where and id_ not in landed:
                self.copy(step, id_, self.home(id_), self.where[id_])

    def land(
        self,
        step: int,
        part: Callable[[int, int, int, int], Place],
        into: Callable[[int], list[Place]] = lambda id_: [],
        placed: Callable[[int, int], Place | None] = lambda peer, id_: None,
        partial_at_home: bool = False,
    ) -> None:
        """The landings of a step.

        ``part(peer, place, slot, id)``: where a peer's part lies; ``into(id)``: further places for a sum;
        ``placed(peer, id)``: where the part lies already, if nothing is left to do.
        """
        for one in sorted(self.plan.steps[step].landings, key=self._distance):
            for k, id_ in enumerate(_ids([one.span])):
                complete = self.finished(step, id_)
                parts = [(p.peer, part(p.peer, p.place + k, p.slot + k, id_)) for p in one.parts]
                keeps = complete or partial_at_home
                if one.reduce:
                    parts.append((self.rank, self.where[id_]))
                    more = into(id_)
                    kept = not more or (keeps and id_ in self.after) or self._needed_later(step, id_)
                    to = [self.home(id_, keeps), *more] if kept else more
                    self.sum(step, id_, to, [place for _, place in sorted(parts, key=lambda p: p[0])], complete)
                    self.where[id_] = to[0]
                else:
                    home = placed(parts[0][0], id_)
                    if home is None:
                        home = self.home(id_, keeps)
                        self.copy(step, id_, home, parts[0][1])
                    self.where[id_] = home
        self._totals(step)

    def _totals(self, step: int) -> None:
        """The sums of a deterministic plan that are complete after a step."""
        for chunk in _ids(self.plan.steps[step].sums):
            total = self.n * self.c.num_chunks + chunk
            parts, home = [self.where[j * self.c.num_chunks + chunk] for j in range(self.n)], self.home(total)
            self.sum(step, total, [home], parts, True)
            self.where[total] = home

    def _distance(self, one: Landing) -> tuple[bool, int]:
        """Not all at the same peer at a time."""
        return one.reduce, (one.parts[0].peer - self.rank) % self.n

    # Placements

    def staged(self) -> None:
        """See the module's text."""
        for step, moved in enumerate(self.plan.steps):
            for k, id_ in enumerate(_ids(moved.staged)):
                if (step, id_) not in self.forwarded:
                    self.copy(step, id_, self.slot(step, k), self.where[id_])
            if step == 0:
                self.keep(0)  # while its lines are warm
            self.meet(step)
            self.land(
                step,
                lambda peer, place, slot, id_, step=step: self.slot(step, slot, peer),  # type: ignore[misc]
                lambda id_, step=step: self._forward(step, id_),  # type: ignore[misc]
            )
        if not self.plan.steps:
            self.meet(0)
            self.keep(0)

    def _forward(self, step: int, id_: int) -> list[Place]:
        """The slot from which the sum of a step is sent in the next one: it is stored there at once."""
        steps = self.plan.steps[step + 1 :]
        for k, sent in enumerate(_ids(steps[0].staged) if steps else ()):
            if sent == id_:
                self.forwarded.add((step + 1, id_))
                return [self.slot(step + 1, k)]
        return []

    def _needed_later(self, step: int, id_: int) -> bool:
        """True if this rank reads the sum of a step again, apart from the slot that it is forwarded to."""
        for number, moved in enumerate(self.plan.steps[step + 1 :]):
            if number > 0 and id_ in _ids(moved.staged):
                return True
            landing = [one.reduce for one in moved.landings if id_ in _ids([one.span])]
            if landing:
                return any(landing)
        return False

    def mailbox(self) -> None:
        """See the module's text."""
        if not has_mailboxes(self.moves):
            raise Unfit(f"{self.schedule.name} {self.c.name} has no sum that could be pushed: staged")
        first = {rank: {id_: k for k, id_ in enumerate(ids)} for rank, ids in self.moves[0].staged.items()}
        spread = readers(self.moves[1], self.rank)
        for k, id_ in enumerate(_ids(self.plan.steps[0].staged)):
            self.copy(0, id_, self.slot(0, k), self.where[id_])
        self.meet(0)
        self.land(
            0,
            lambda peer, place, slot, id_: self.slot(0, slot, peer),
            lambda id_: [self.slot(0, first[peer][id_], peer) for peer in spread.get(id_, ())],
        )
        self.meet(1)
        for id_ in _ids(one.span for one in self.plan.steps[1].landings):
            self.copy(1, id_, self.home(id_), self.slot(0, first[self.rank][id_]))

    def put(self) -> None:
        """See the module's text."""
        numbers = [arrival_slots(step) for step in self.moves]
        self.slots = tuple(max(map(len, arrived.values()), default=0) for arrived in numbers)

        def slots_of_readers(step: int, id_: int) -> list[Place]:
            found = readers(self.moves[step], self.rank).get(id_, ()) if step < len(self.moves) else ()
            return [self.slot(step, numbers[step][peer][self.rank, id_], peer) for peer in found]

        def forward(step: int, id_: int) -> list[Place]:
            self.forwarded.add((step, id_))
            return slots_of_readers(step, id_)

        for step, moved in enumerate(self.plan.steps):
            for id_ in _ids(moved.staged):
                if (step, id_) not in self.forwarded:
                    for place in slots_of_readers(step, id_):
                        self.copy(step, id_, place, self.where[id_])
            if step == 0:
                self.keep(0)
            self.meet(step)
            self.land(
                step,
                lambda peer, place, slot, id_, step=step: self.slot(step, numbers[step][self.rank][peer, id_]),  # type: ignore[misc]
                lambda id_, step=step: forward(step + 1, id_),  # type: ignore[misc]
            )
        if not self.plan.steps:
            self.meet(0)
            self.keep(0)

    def direct(self) -> None:
        """See the module's text."""
        self._direct(lambda source, peer, id_: False)

    def pushed(self) -> None:
        """See the module's text."""
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
        if self.plan.deterministic:
            raise Unfit("contributions that travel apart are kept in memory that is not mapped: staged")
        mailboxes = has_mailboxes(self.moves)
        if mailboxes and self.c.name not in ("all_reduce", "barrier"):
            raise Unfit("sums are pushed into outputs, which peers offer only where they are inputs as well: staged")
        landed = landed_before(self.moves)
        if not mailboxes:
            self._check_direct()
        spread = readers(self.moves[1], self.rank) if mailboxes else {}

        def part(step: int) -> Callable[[int, int, int, int], Place]:
            def place(peer: int, _: int, slot: int, id_: int) -> Place:
                return out(id_, peer) if id_ in landed[step].get(peer, ()) else in_(id_, peer)

            return place

        self.meet(0)
        self.keep(0)
        for step, moved in enumerate(self.moves[:1] if mailboxes else self.moves):
            for peer, chunks in moved.messages.get(self.rank, {}).items():
                for id_ in (id_ for id_ in chunks if stored(self.rank, peer, id_)):
                    self.copy(step, id_, out(id_, peer), self.where[id_])
            self.land(
                step,
                part(step),
                lambda id_: [out(id_, peer) for peer in spread.get(id_, ())],
                lambda peer, id_: out(id_) if stored(peer, self.rank, id_) else None,
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
        for step, moved in enumerate(self.plan.steps):
            first, self.recvbufs = self.recvbufs, self.recvbufs + sum(len(_ids(m.spans)) for m in moved.receives)
            mailboxes: dict[int, int] = {}
            for message in moved.sends:
                for id_ in _ids(message.spans):
                    row = Row("send", step, self.chunk(id_), parts=(self.where[id_],), peer=message.peer)
                    self.rows.append(row)
            sent = {self.chunk(id_) for id_ in _ids(moved.staged)}  # of an input that may be the output as well
            landed = [id_ for one in moved.landings for id_ in _ids([one.span])]
            copied = {id_ for one in moved.landings if not one.reduce for id_ in _ids([one.span])}
            in_place: dict[int, Place] = {}
            for message in moved.receives:
                mailboxes[message.peer] = first
                for id_ in _ids(message.spans):
                    to = recvbuf(first)
                    if id_ in copied and self.chunk(id_) not in sent and landed.count(id_) == 1:
                        # it is copied over what nothing else in this step touches
                        to = in_place[id_] = self.home(id_, self.finished(step, id_))
                    self.rows.append(Row("recv", step, self.chunk(id_), to=(to,), peer=message.peer))
                    first += 1
            if step == 0:
                self.keep(0)
            self.rows.append(Row("wait", step))
            self.land(
                step,
                lambda peer, place, slot, id_, mailboxes=mailboxes: recvbuf(mailboxes[peer] + place),  # type: ignore[misc]
                placed=lambda peer, id_, arrived=in_place: arrived.get(id_),  # type: ignore[misc]
            )
        if not self.plan.steps:
            self.keep(0)
