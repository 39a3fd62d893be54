"""The state of ranks that are late: gone, aborted, stopped, or busy elsewhere."""

import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from unisono.errors import CollectiveTimeout
from unisono.runtime.call_site import from_here
from unisono.runtime.header import read_header
from unisono.runtime.monitor import Loss
from unisono.transport.layout import (
    ABSENT,
    COMPLETED,
    COMPLETED_AT,
    EXIT_NOTE,
    GAVE_UP,
    HEADER,
    JOINED,
    LEFT,
    MESSAGE_ERROR,
)
from unisono.transport.process import Identity, alive, fate, stopped
from unisono.transport.segment import Elsewhere, Segment
from unisono.watch.exit_notes import read_exit_note
from unisono.watch.status_page import own_page

__all__ = ["REPLACED", "Lateness", "PeerState", "now"]

_PATIENCE = 0.3  # s of waiting for the stacks of ranks that are late
_OVER_HOSTS = 4  # times the patience of one host
REPLACED = "has replaced itself by another program (exec)"
_STOPPED, _NO_ANSWER = "it is stopped (by a signal or in a debugger)", "it does not answer"


class Lateness(NamedTuple):
    """Of a rank that is late: what it has ``done`` in a group, what it does now, its last message that ``failed``."""

    done: str
    doing: str
    failed: str

    @property
    def line(self) -> str:
        """All of it."""
        failed = f"; the last of its messages that failed: {self.failed}" if self.failed else ""
        return f"{self.done}; {self.doing}{failed}" if self.doing else self.done

    @property
    def cause(self) -> str:
        """The same without the message, if the rank does nothing, and so may never come; else empty."""
        return f"{self.done}; {self.doing}" if self.doing.startswith((_STOPPED, _NO_ANSWER)) else ""


class PeerState:
    """The other ranks of the group of ``global_ranks``, as its segment shows them; ranks are numbers in the group."""

    def __init__(self, segment: Segment, global_ranks: Sequence[int]) -> None:
        self._segment, self.global_ranks = segment, global_ranks

    def _far(self, rank: int) -> Elsewhere | None:
        """What is known of a rank of another host; None for one of this host."""
        elsewhere = self._segment.elsewhere
        return elsewhere if elsewhere is not None and rank in elsewhere else None

    def _who(self, rank: int) -> str:
        name = self.global_ranks[rank]
        if (far := self._far(rank)) is not None:
            return far.who(rank, name)
        return f"rank {name} (pid {self._segment.identity(rank).pid} on {socket.gethostname()})"

    def loss(self, rank: int) -> Loss | None:
        """The loss of ``rank``; None if it may still arrive."""
        if (far := self._far(rank)) is not None:
            return self._loss_elsewhere(rank, far.ended(rank))
        who = self._segment.identity(rank)
        found = self._loss(rank, who) if who.pid else None
        return found and found._replace(who=who)

    def gone(self, rank: int) -> Loss | None:
        """The loss of ``rank`` for good; None if it lives, even if it has given the group up."""
        if (far := self._far(rank)) is not None:
            return self._loss_elsewhere(rank, far.gone(rank))
        found = self.loss(rank)
        if found is None or self._segment.state(rank) != GAVE_UP:  # in this order: it may give up meanwhile
            return found
        who = self._segment.identity(rank)
        return None if alive(who) else Loss(f"{self._who(rank)} is dead: {fate(who)}", who=who)

    def _loss_elsewhere(self, rank: int, ended: tuple[int, str] | None) -> Loss | None:
        """The same of a rank of another host, by what it or its connection has reported."""
        if ended is None:
            return None
        state, note = ended
        return self._parting(rank, state, read_exit_note(note)) or Loss(f"{self._who(rank)} is lost: {note}")

    def _parting(self, rank: int, state: int, left: Loss) -> Loss | None:
        """The loss of a rank that has left the group or given it up; None in another state. ``left``: its exit note."""
        here = self._who(rank)
        if state == LEFT:
            return Loss(f"{here} {left.words or 'has left the group'}", left.cause)
        if state == GAVE_UP:
            words = "has given this group up"
            return Loss(f"{here} {words} over it" if left.cause else f"{here} {words}: {left.words}", left.cause)
        return None

    def _loss(self, rank: int, who: Identity) -> Loss | None:
        segment = self._segment
        state = segment.state(rank)
        if state == ABSENT and segment.absentees is not None:
            mismatch = segment.absentees.mismatch()
            absent = Loss(mismatch) if mismatch else Loss(*segment.absentees.gone(rank))
            # What it did in the meantime is no longer true of a rank that has joined since.
            return absent if absent.words and segment.state(rank) == ABSENT else None
        dead = not alive(who)
        while True:
            left = read_exit_note(segment.text(rank, EXIT_NOTE))
            if segment.state(rank) == state:
                break
            state = segment.state(rank)
        if dead and state != LEFT:
            return Loss(f"{self._who(rank)} is dead: {left.words or fate(who)}", left.cause)
        if state == JOINED and own_page().replaced(who):
            # One that has left in the meantime has no page for that reason.
            return Loss(f"{self._who(rank)} {REPLACED}") if segment.state(rank) == JOINED else self.loss(rank)
        return self._parting(rank, state, left)

    def losses(self, missing: Sequence[int]) -> list[Loss]:
        """The losses over which a call of all ranks never ends: of ``missing`` ranks, else of ranks that died in it.

        A call at which all have arrived may have ended for those that are gone: check missing ranks again afterwards.
        """
        found = [lost for rank in missing if (lost := self.loss(rank))]
        there = [rank for rank in range(len(self.global_ranks)) if rank not in missing]
        return found or [lost for rank in there if (lost := self._killed(rank))]

    def _killed(self, rank: int) -> Loss | None:
        """The loss of a rank that arrived at a call and died in it; None if it lives, has left or has aborted."""
        if (far := self._far(rank)) is not None:
            ended = far.ended(rank)
            return Loss(f"{self._who(rank)} is lost: {ended[1]}") if ended and not ended[0] else None
        who = self._segment.identity(rank)
        if not who.pid or alive(who) or self._segment.state(rank) != JOINED:
            return None
        return Loss(f"{self._who(rank)} is dead: {fate(who)}; it had come to this call", who=who)

    def late(self, what: str, missing: Sequence[int]) -> CollectiveTimeout:
        """The error of a call that ``missing`` ranks keep from ending (``what`` says which), with a line on each.

        Its cause is those of them that do nothing.
        """
        found = self.lateness([rank for rank in missing if self._far(rank) is None])
        if (elsewhere := self._segment.elsewhere) is not None:
            far = [rank for rank in missing if rank in elsewhere]
            found |= {rank: self._lateness(rank, _NO_ANSWER) for rank in far}
            answers = elsewhere.activities(far, _OVER_HOSTS * _PATIENCE)
            # A rank that has given the call up meanwhile may have left before it was asked: its note says over whom.
            left = {rank: loss for rank in far if rank not in answers and (loss := self.loss(rank)) is not None}
            found |= {
                rank: Lateness(f"{loss.words}: {loss.cause}", "", "") for rank, loss in left.items() if loss.cause
            }
            found |= {rank: Lateness(*answer) for rank, answer in answers.items()}
            missing = [*missing, *(proxies := self._stopped_proxies(elsewhere, missing))]
            found |= {rank: self._lateness(rank, _STOPPED) for rank in proxies}
        error = CollectiveTimeout(what + "".join(f"\n  {found[rank].line}" for rank in missing))
        error.cause = "; ".join(found[rank].cause for rank in missing if found[rank].cause)
        return error

    def frozen(self, ranks: Sequence[int]) -> set[int]:
        """Those of these ranks that are stopped, as far as they, or the ranks of their hosts, answer in time."""
        elsewhere = self._segment.elsewhere
        far = elsewhere.activities(ranks, _PATIENCE) if elsewhere is not None else {}
        found = {rank for rank, answer in far.items() if Lateness(*answer).doing == _STOPPED}
        return found | {rank for rank in ranks if stopped(self._segment.identity(rank))}

    def _stopped_proxies(self, elsewhere: Elsewhere, missing: Sequence[int]) -> list[int]:
        """The ranks of this host that are stopped, and lay down what other hosts send: to missing ones, or to any."""
        if not missing:
            return [rank for rank in elsewhere.local if stopped(self._segment.identity(rank))]
        proxies = {proxy for rank in missing if rank in elsewhere for proxy in elsewhere.proxies(rank)}
        return [rank for rank in sorted(proxies - set(missing)) if stopped(self._segment.identity(rank))]

    def lateness(self, ranks: Sequence[int]) -> dict[int, Lateness]:
        """The lateness of ranks of this host."""
        found = {
            rank: Lateness(f"rank {self.global_ranks[rank]} has never joined this group", "", "") for rank in ranks
        }
        joined = {rank: who for rank in ranks if (who := self._segment.identity(rank)).pid}
        asked = {rank: who for rank, who in joined.items() if not stopped(who)}
        answers = dict(zip(asked, own_page().stacks_of(list(asked.values()), _PATIENCE), strict=True))
        return found | {rank: self._lateness(rank, now(who, answers.get(rank, ""))) for rank, who in joined.items()}

    def _lateness(self, rank: int, doing: str) -> Lateness:
        segment = self._segment
        done = segment.longs[segment.field(rank, COMPLETED)]
        if done:
            at, since = segment.longs[segment.field(rank, HEADER)], segment.longs[segment.field(rank, COMPLETED_AT)]
            header = read_header(segment.raw[at : at + 96 + 16 * segment.layout.world_size])
            last = header.describe() if header is not None else ""
            ago = (time.monotonic_ns() - since) / 1e9
            words = f"last completed call no. {done} {last} {ago:.1f} s ago"
        else:
            joined = "" if segment.state(rank) != ABSENT else ", nor joined it"
            words = f"has not completed a call in this group{joined}"
        return Lateness(f"{self._who(rank)} {words}", doing, segment.text(rank, MESSAGE_ERROR))


def now(who: Identity, answer: str) -> str:
    """The present activity of a process; ``answer``: its stacks, if it answered."""
    if stopped(who):
        return _STOPPED
    if answer:
        return f"now at {from_here(answer.splitlines()[0])}"
    return f"{_NO_ANSWER} (busy outside Python, holding the interpreter lock)"
