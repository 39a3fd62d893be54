"""The state of ranks that are late: gone, aborted, stopped, or busy elsewhere."""

import socket
import time
from collections.abc import Sequence

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

__all__ = ["REPLACED", "frozen", "gone", "late", "lateness", "loss", "losses", "now"]

_PATIENCE = 0.3  # s of waiting for the stacks of ranks that are late
_OVER_HOSTS = 4  # times the patience of one host
REPLACED = "has replaced itself by another program (exec)"
_STOPPED = "it is stopped (by a signal or in a debugger)"


def _who(segment: Segment, rank: int, name: int) -> str:
    elsewhere = segment.elsewhere
    if elsewhere is not None and rank in elsewhere:
        return elsewhere.who(rank, name)
    return f"rank {name} (pid {segment.identity(rank).pid} on {socket.gethostname()})"


def loss(segment: Segment, rank: int, name: int) -> Loss | None:
    """The loss of ``rank`` (global rank ``name``); None if it may still arrive."""
    elsewhere = segment.elsewhere
    if elsewhere is not None and rank in elsewhere:
        return _loss_elsewhere(elsewhere, rank, name, elsewhere.ended(rank))
    who = segment.identity(rank)
    found = _loss(segment, rank, name, who) if who.pid else None
    return found and found._replace(who=who)


def gone(segment: Segment, rank: int, name: int) -> Loss | None:
    """The loss of ``rank`` (global rank ``name``) for good; None if it lives, even if it has given the group up."""
    elsewhere = segment.elsewhere
    if elsewhere is not None and rank in elsewhere:
        return _loss_elsewhere(elsewhere, rank, name, elsewhere.gone(rank))
    found = loss(segment, rank, name)
    if found is None or segment.state(rank) != GAVE_UP:  # in this order: it may give up meanwhile
        return found
    who = segment.identity(rank)
    return None if alive(who) else Loss(f"{_who(segment, rank, name)} is dead: {fate(who)}", who=who)


def _loss_elsewhere(elsewhere: Elsewhere, rank: int, name: int, ended: tuple[int, str] | None) -> Loss | None:
    """The same of a rank of another host, by what it or its connection has reported."""
    if ended is None:
        return None
    state, note = ended
    here = elsewhere.who(rank, name)
    return _parting(here, state, read_exit_note(note)) or Loss(f"{here} is lost: {note}")


def _parting(here: str, state: int, left: Loss) -> Loss | None:
    """The loss of a rank that has left the group or given it up; None in another state. ``left``: its exit note."""
    if state == LEFT:
        return Loss(f"{here} {left.words or 'has left the group'}", left.cause)
    if state == GAVE_UP:
        words = "has given this group up"
        return Loss(f"{here} {words} over it" if left.cause else f"{here} {words}: {left.words}", left.cause)
    return None


def _loss(segment: Segment, rank: int, name: int, who: Identity) -> Loss | None:
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
    here = _who(segment, rank, name)
    if dead and state != LEFT:
        return Loss(f"{here} is dead: {left.words or fate(who)}", left.cause)
    if state == JOINED and own_page().replaced(who):
        # One that has left in the meantime has no page for that reason.
        return Loss(f"{here} {REPLACED}") if segment.state(rank) == JOINED else loss(segment, rank, name)
    return _parting(here, state, left)


def losses(segment: Segment, missing: Sequence[int], global_ranks: Sequence[int]) -> list[Loss]:
    """The losses over which a call of all ranks never ends: of ``missing`` ranks, else of ranks that died in it.

    A call at which all have arrived may have ended for those that are gone: check missing ranks again afterwards.
    """
    found = [gone for rank in missing if (gone := loss(segment, rank, global_ranks[rank]))]
    there = [rank for rank in range(len(global_ranks)) if rank not in missing]
    return found or [gone for rank in there if (gone := _killed(segment, rank, global_ranks[rank]))]


def _killed(segment: Segment, rank: int, name: int) -> Loss | None:
    """The loss of a rank that arrived at a call and died in it; None if it lives, has left or has aborted."""
    elsewhere = segment.elsewhere
    if elsewhere is not None and rank in elsewhere:
        ended = elsewhere.ended(rank)
        return Loss(f"{elsewhere.who(rank, name)} is lost: {ended[1]}") if ended and not ended[0] else None
    who = segment.identity(rank)
    if not who.pid or alive(who) or segment.state(rank) != JOINED:
        return None
    return Loss(f"{_who(segment, rank, name)} is dead: {fate(who)}; it had come to this call", who=who)


def lateness(segment: Segment, missing: Sequence[int], global_ranks: Sequence[int]) -> str:
    """A line per missing rank: what it completed last in this group, when, and what it does now."""
    there = [rank for rank in missing if segment.identity(rank).pid]
    doing = activities(segment, there)
    lines: dict[int, str] = {}
    if (elsewhere := segment.elsewhere) is not None:
        lines = elsewhere.activities(missing, _OVER_HOSTS * _PATIENCE, placed=True)
        doing |= {rank: "" for rank in missing if rank in elsewhere}
        missing = [*missing, *_stopped_proxies(segment, elsewhere, missing)]
        doing |= {rank: now(segment.identity(rank), "") for rank in missing if rank not in doing}
    found = [lines.get(rank) or late(segment, rank, global_ranks[rank], doing.get(rank)) for rank in missing]
    return "".join(f"\n  {line}" for line in found)


def frozen(segment: Segment, ranks: Sequence[int]) -> set[int]:
    """Those of these ranks that are stopped, as far as they, or the ranks of their hosts, answer in time."""
    far = segment.elsewhere.activities(ranks, _PATIENCE) if segment.elsewhere is not None else {}
    return {rank for rank in ranks if far.get(rank) == _STOPPED or stopped(segment.identity(rank))}


def _stopped_proxies(segment: Segment, elsewhere: Elsewhere, missing: Sequence[int]) -> list[int]:
    """The ranks of this host that are stopped, and lay down what ranks of other hosts send: missing ones, or any."""
    if not missing:
        return [rank for rank in elsewhere.local if stopped(segment.identity(rank))]
    proxies = {proxy for rank in missing if rank in elsewhere for proxy in elsewhere.proxies(rank)}
    return [rank for rank in sorted(proxies - set(missing)) if stopped(segment.identity(rank))]


def activities(segment: Segment, ranks: Sequence[int]) -> dict[int, str]:
    """The present activities of ranks of this host, in words."""
    every = {rank: segment.identity(rank) for rank in ranks}
    asked = {rank: who for rank, who in every.items() if not stopped(who)}
    answers = dict(zip(asked, own_page().stacks_of(list(asked.values()), _PATIENCE), strict=True))
    return {rank: now(who, answers.get(rank, "")) for rank, who in every.items()}


def now(who: Identity, answer: str) -> str:
    """The present activity of a process; ``answer``: its stacks, if it answered."""
    if stopped(who):
        return _STOPPED
    if answer:
        return f"now at {from_here(answer.splitlines()[0])}"
    return "it does not answer (busy outside Python, holding the interpreter lock)"


def late(segment: Segment, rank: int, name: int, doing: str | None) -> str:
    """A line on a rank that is late, in this group; ``doing``: what it does now, None if it has never joined."""
    if doing is None:
        return f"rank {name} has never joined this group"
    done = segment.longs[segment.field(rank, COMPLETED)]
    if done:
        at, since = segment.longs[segment.field(rank, HEADER)], segment.longs[segment.field(rank, COMPLETED_AT)]
        header = read_header(segment.raw[at : at + 96 + 16 * segment.layout.world_size])
        last = header.describe() if header is not None else ""
        ago = (time.monotonic_ns() - since) / 1e9
        words = f"last completed call no. {done} {last} {ago:.1f} s ago"
    else:
        words = "has not completed a call in this group" + (", nor joined it" if segment.state(rank) == ABSENT else "")
    failure = segment.text(rank, MESSAGE_ERROR)
    failed = f"; the last of its messages that failed: {failure}" if failure else ""
    return f"{_who(segment, rank, name)} {words}; {doing or 'it does not answer'}{failed}"
