"""The agreement of the ranks that live on who they are. The job's store, which may be lost with a rank, has no part.

Every rank publishes a `State`: in the memory of its host, and to the other hosts over the connections of the group. It
proposes whom it takes for lost and takes over what the others propose; once all that are left propose the same, they
join the new group, and each publishes that it has. A rank is done once all have. One that dies in between, or fails to
join, makes the others propose anew, unless one of them is done: then all others are, for nobody proposes anew after
that. So no two ranks that live and reach each other come out with different groups.

The idea of agreeing before anybody goes on is that of MPI's ULFM (Bland et al. 2013, MPI_Comm_shrink).
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from unisono.errors import CollectiveTimeout, PeerLostError, UnisonoError
from unisono.runtime.monitor import Loss
from unisono.transport.layout import SHRINKING
from unisono.transport.segment import Segment
from unisono.units import name_ranks
from unisono.watch.exit_notes import lost, short
from unisono.watch.peer_state import PeerState

__all__ = ["Survivors", "Table"]

_AWAY, _PROPOSES, _JOINED, _DONE = range(4)
_PAUSE = 0.003  # s between two looks at what the others have published
_TRIES = 4  # joins of the same survivors that may fail
_LOOK = 1.5  # s between two looks whether ranks that have not come are stopped
_ON_ITS_WAY = 0.05  # s: what a rank of another host has published may come after the news that it has left
_KEPT = 4  # groups whose last state a rank keeps published
_WORDS = 300  # characters of the reasons that are published

_publishing = threading.RLock()


class State(NamedTuple):
    """What a rank publishes: how far it is; how often joining failed; whom it takes for lost, as bits, and why.

    ``address``: of the store, host and port, where the rank is the first that survives.
    """

    phase: int = _AWAY
    attempt: int = 0
    lost: int = 0
    address: str = ""
    why: str = ""

    @property
    def proposal(self) -> tuple[int, int]:
        """What all have to publish alike."""
        return self.attempt, self.lost


class Table:
    """Where the members of a group publish their states: a segment of which they are ``members``, in group order.

    ``names`` are the global ranks of the segment's ranks, ``rank`` is this one's in the group, ``key`` names the group.
    """

    def __init__(
        self, segment: Segment, members: Sequence[int], names: Sequence[int], rank: int, key: str
    ) -> None:  # fmt: skip
        self.size, self.rank = len(members), rank
        self._segment, self._members, self._names = segment, list(members), names
        self._peers = PeerState(segment, names)
        self._key = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()

    def publish(self, state: State) -> None:
        """Publishes this rank's state."""
        with _publishing:
            mine = self._members[self.rank]
            states = json.loads(self._segment.text(mine, SHRINKING) or "{}")
            states.pop(self._key, None)
            kept = dict([*states.items(), (self._key, state)][-_KEPT:])
            text = json.dumps(kept, ensure_ascii=False)
            self._segment.set_text(mine, SHRINKING, text)
            if self._segment.elsewhere is not None:
                self._segment.elsewhere.publish_shrinking(text)

    def read(self, rank: int) -> State:
        """The state that a rank has published last."""
        at, elsewhere = self._members[rank], self._segment.elsewhere
        far = elsewhere is not None and at in elsewhere
        text = elsewhere.shrinking(at) if far and elsewhere is not None else self._segment.text(at, SHRINKING)
        with suppress(ValueError):
            return State(*json.loads(text or "{}").get(self._key, ()))
        return State()

    def far(self, rank: int) -> bool:
        """True if a rank is on another host."""
        elsewhere = self._segment.elsewhere
        return elsewhere is not None and self._members[rank] in elsewhere

    def gone(self, rank: int) -> Loss | None:
        """The loss of a rank for good."""
        return self._peers.gone(self._members[rank])

    def name(self, rank: int) -> int:
        """The global rank of a rank."""
        return self._names[self._members[rank]]

    def late(self, what: str, missing: Sequence[int]) -> CollectiveTimeout:
        """The error of what ``missing`` ranks keep from ending, with what each does now."""
        return self._peers.late(what, [self._members[rank] for rank in missing])

    def frozen(self, ranks: Sequence[int]) -> frozenset[int]:
        """Those of these ranks that are stopped."""
        found = self._peers.frozen([self._members[rank] for rank in ranks])
        return frozenset(rank for rank in ranks if self._members[rank] in found)

    def address(self, ranks: Sequence[int]) -> str:
        """This rank's address for these ranks."""
        elsewhere = self._segment.elsewhere
        if elsewhere is None or not any(self.far(rank) for rank in ranks):
            return "127.0.0.1"
        return elsewhere.address(self._members[self.rank])


class Survivors:
    """One rank's part in the agreement on the group ``label``, which can take ``timeout`` seconds.

    ``excluded``: ranks that this one leaves out, living or not; ``least``: how many have to survive; ``port``: of a
    store that this rank serves, called if it is the first that survives.
    """

    def __init__(
        self, table: Table, label: str, excluded: Sequence[int], least: int, timeout: float, port: Callable[[], int]
    ) -> None:  # fmt: skip
        self._table, self._label, self._least, self._timeout, self._port = table, label, least, timeout, port
        self._deadline = time.monotonic() + timeout
        self.lost = {rank: f"rank {table.name(rank)} was left out (ranks_to_exclude)" for rank in excluded}
        """Why each of the ranks that do not survive does not."""
        before = table.read(table.rank)
        self._attempt, self._failures = before.attempt + (before != State()), 0  # another one than in an earlier call
        self._mine = State()
        self._joined: State | None = None
        self._states: dict[int, State] = {}
        self._came: set[int] = set()
        self._look_at, self._frozen = time.monotonic() + _LOOK, frozenset[int]()
        self._others = [rank for rank in range(table.size) if rank != table.rank]

    @property
    def ranks(self) -> list[int]:
        """The group ranks that survive, as far as this one knows."""
        return [rank for rank in range(self._table.size) if rank not in self.lost]

    @property
    def mark(self) -> str:
        """Names the present proposal, alike on all ranks."""
        return f"{self._attempt}/{self._bits():x}"

    @property
    def address(self) -> str:
        """Where the first of them serves the store."""
        return self._states[self.ranks[0]].address if self.ranks[0] != self._table.rank else self._mine.address

    def agree(self, join: Callable[[], None]) -> None:
        """Returns once all that live have joined the same new group, by ``join``.

        Raises `CollectiveTimeout` naming the ranks that live and do not take part, `PeerLostError` if the others have
        left this rank out, and what ``join`` raises but for errors over which to try again.
        """
        try:
            while True:
                self._propose()
                self._check_size()
                if self._ended() or (self._try(join) and self._confirmed()):
                    break
        except BaseException:
            self._publish(_AWAY)
            raise
        assert self._joined is not None
        self._attempt, bits = self._joined.proposal
        self.lost = {rank: words for rank, words in self.lost.items() if bits >> rank & 1}
        self._publish(_DONE)

    def check(self) -> None:
        """Raises `PeerLostError` if the proposal over which this rank is joining does not hold any more."""
        if self._update():
            raise PeerLostError(f"{self._what()} begins again: {'; '.join(self.lost.values())}")

    def _bits(self) -> int:
        return sum(1 << rank for rank in self.lost)

    def _what(self) -> str:
        return f"shrink({self._label})"

    def _publish(self, phase: int) -> None:
        address = ""
        if phase and self.ranks[0] == self._table.rank:
            address = f"{self._table.address(self.ranks)} {self._port()}"
        why = short("; ".join(self.lost.values()), _WORDS)
        state = State(phase, self._attempt, self._bits(), address, why)
        if state != self._mine:
            self._mine = state
            self._table.publish(state)

    def _read(self) -> None:
        self._states = {rank: self._table.read(rank) for rank in self._others}

    def _ended(self) -> bool:
        """True if a rank is done with the group that this one has joined last."""
        joined = self._joined
        ends = [state.proposal for state in self._states.values() if state.phase == _DONE]
        return joined is not None and joined.proposal in ends

    def _update(self) -> bool:
        """Takes over what the others propose, and who is gone; returns whether that changes this rank's proposal."""
        self._read()
        before = self._attempt, self._bits()
        for rank in self._others:
            if rank in self.lost or self._states[rank].phase == _DONE or (loss := self._table.gone(rank)) is None:
                continue
            if self._table.far(rank):
                time.sleep(_ON_ITS_WAY)
            self._states[rank] = self._table.read(rank)  # who is done publishes it, and then leaves the old group
            if self._states[rank].phase != _DONE:
                self.lost[rank] = loss.words
        for rank, state in self._states.items():
            if rank in self.lost or state.phase == _AWAY:
                continue
            self._came.add(rank)
            self._attempt = max(self._attempt, state.attempt)
            if state.lost >> self._table.rank & 1 and not self._ended():
                me, other = self._table.name(self._table.rank), self._table.name(rank)
                raise PeerLostError(
                    f"{self._what()}: rank {me} has been left out of the new group: rank {other} goes on without it "
                    f"({state.why}). It can only end, and join again when the job is started anew"
                )
            for other in range(self._table.size):
                if state.lost >> other & 1:
                    self.lost.setdefault(other, f"rank {self._table.name(other)}: {state.why}")
        return before != (self._attempt, self._bits())

    def _propose(self) -> None:
        """Returns once all that are left propose the same, or one is done with what this rank has joined."""
        while True:
            self._update()
            if self._ended():
                return
            self._publish(_PROPOSES)
            self._wait_for([rank for rank in self.ranks if not self._agrees(rank, _PROPOSES)])
            if all(self._agrees(rank, _PROPOSES) for rank in self.ranks):
                return

    def _try(self, join: Callable[[], None]) -> bool:
        """Joins; returns False where that is to be tried again."""
        self._joined, before = None, self._bits()
        try:
            join()
        except (PeerLostError, CollectiveTimeout):
            self._update()
            self._failures = self._failures + 1 if self._bits() == before else 0
            if self._failures == _TRIES or time.monotonic() > self._deadline:
                raise
            self._attempt += self._mine.attempt == self._attempt
            return False
        self._publish(_JOINED)
        self._joined = self._mine
        return True

    def _confirmed(self) -> bool:
        """True once all have joined; False if they have to propose anew."""
        while True:
            self._read()
            missing = [rank for rank in self.ranks if not self._agrees(rank, _JOINED)]
            if not missing or self._ended():
                return True
            if self._update():
                return False
            self._wait_for(missing)

    def _agrees(self, rank: int, phase: int) -> bool:
        if rank == self._table.rank:
            return True
        state = self._states[rank]
        return state.phase >= phase and state.proposal == self._mine.proposal

    def _wait_for(self, missing: Sequence[int]) -> None:
        """Sleeps a little if there are any; raises `CollectiveTimeout` naming them if they are stopped, or too late."""
        if not missing:
            return
        now = time.monotonic()
        if now > self._deadline:
            raise self._late(missing, f"did not end within its timeout of {self._timeout:g} s")
        if now > self._look_at:
            before, self._frozen = self._frozen, self._table.frozen(missing)
            if still := self._frozen & before:
                raise self._late(sorted(still), f"waits in vain, long before its timeout of {self._timeout:g} s")
            self._look_at = time.monotonic() + _LOOK
        time.sleep(_PAUSE)

    def _late(self, missing: Sequence[int], what: str) -> UnisonoError:
        absent = [rank for rank in missing if rank not in self._came]
        missing, how = (absent, "did not come") if absent else (missing, "came and did not go on")
        names = [self._table.name(rank) for rank in missing]
        came = {*self._came, self._table.rank} - set(missing)
        others = ", ".join(str(self._table.name(rank)) for rank in self.ranks if rank in came)
        who = f"{name_ranks(names)} {'lives' if len(names) == 1 else 'live'}"
        return self._table.late(
            f"{self._what()} {what}: {who} and {how} (came: {others}); every rank that lives must call it, or "
            f"be left out: shrink(ranks_to_exclude={list(missing)})",
            missing,
        )

    def _check_size(self) -> None:
        if len(self.ranks) < self._least:
            left = f"{self._what()}: {len(self.ranks)} of {self._table.size} ranks are left, min_size is {self._least}"
            raise lost(left, [Loss(words) for words in self.lost.values()])
