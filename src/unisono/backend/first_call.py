"""The first call of a rank in a group that its first rank has not made: a published wait, with its errors."""

import socket
import time

from unisono.backend.member_registry import MemberRegistry
from unisono.errors import CollectiveTimeout, DeadlockError, UsageError
from unisono.runtime.call import call_site, site_text
from unisono.runtime.queue import any_listeners
from unisono.watch.deadlock import LongWait
from unisono.watch.peer_state import now
from unisono.watch.status_page import own_page

__all__ = ["FirstCall"]

_LONG = 0.05  # s after which a wait is published
_PATIENCE = 0.3  # s of waiting for the stacks of the first rank


class FirstCall:
    """Checks the first rank for `attach`. ``op``: the call; ``label``: the group; ``first``, ``rank``: global ranks."""

    def __init__(self, members: MemberRegistry, op: str, label: str, first: int, rank: int, timeout: float) -> None:
        self._members, self._first, self._rank, self._timeout = members, first, rank, timeout
        self._call = f"{op}, the first call of rank {rank} in {label}"
        self._wait: LongWait | None = None
        self._long = time.monotonic() + _LONG

    def check(self) -> None:
        """Raises `DeadlockError`, and what `MemberRegistry.check` raises."""
        if time.monotonic() > self._long:
            self._check_deadlock()
        self._members.check()

    def _check_deadlock(self) -> None:
        """Publishes a long wait; checks for deadlocks before losses: a peer may have ended by one already."""
        who = self._members.identity(0)
        if self._wait is None:
            page = own_page()
            text = f"rank {self._rank} (pid {page.me.pid}): {self._call}, waits: {self._missing()}{_here()}"
            self._wait = LongWait(page, lambda: text, any_listeners)
        if words := self._wait.check([who] if who.pid else []):
            raise DeadlockError(words)

    def elsewhere(self, nonce: str) -> None:
        """See `MemberRegistry.elsewhere`."""
        self._members.elsewhere(nonce)

    def barred(self, pid: int) -> UsageError:
        """See `MemberRegistry.barred`."""
        return self._members.barred(pid)

    def late(self) -> CollectiveTimeout:
        """The error if the first rank does not join in time, with its present stack."""
        who = self._members.identity(0)
        text = f"{self._call}, did not end within its timeout of {self._timeout:g} s: {self._missing()}{_here()}"
        if who.pid:
            (answer,) = own_page().stacks_of([who], _PATIENCE)
            text += f"\n  rank {self._first} (pid {who.pid} on {socket.gethostname()}): {now(who, answer)}"
        return CollectiveTimeout(text)

    def end(self) -> None:
        """Ends the publication of the wait."""
        if self._wait is not None:
            self._wait.end()

    def _missing(self) -> str:
        return f"rank {self._first}, which is the group's first, has not made it"


def _here() -> str:
    return f", at {site_text(call_site())}"
