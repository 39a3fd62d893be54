"""The registry of a group's members: announcements of ranks, before or without joining its shared memory.

Every rank writes into the job's store, when it makes a group, its process and the ranks of the group. Groups meet under
their members and a count, not under torch's name: torch counts names on each rank, so that ranks which made different
numbers of groups would wait for each other under different names for ever. A waiting rank reads from the registry
whether a peer lives, and whether it made a group of other ranks at this point instead: then the wait is in vain.

A job that is started again may meet at the same store (torchrun keeps one over all attempts). What was written before
this process was started, by one that has died and was never seen alive from here, or that can not be seen from here, is
left over from an earlier attempt: its rank may still join. The attempts are not counted, for the launchers of one job
count each its own.
"""

import errno
import hashlib
import json
import logging
import os
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from unisono.backend.announcement import Announcement, fresh
from unisono.backend.birth import claimed_twice
from unisono.backend.rendezvous_watch import ABSENT_SECONDS, log_absent, not_met
from unisono.backend.stores import JobStore, announcements
from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError, UnisonoError, UsageError
from unisono.runtime.monitor import Loss
from unisono.transport.host import Host, HostMap, barred, unseen
from unisono.transport.layout import ABSENT, EXIT_NOTE, JOINED, LEFT, PID, Layout
from unisono.transport.process import Identity, alive, fate, ticks
from unisono.transport.segment import Segment, StoreLike
from unisono.units import name_ranks, show_nbytes
from unisono.watch.exit_notes import exit_note, lost, read_exit_note
from unisono.watch.peer_state import REPLACED
from unisono.watch.status_page import own_page

__all__ = ["MemberRegistry", "SeveralHosts", "default_memory"]

_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, errno.EAGAIN, errno.ENOSPC}
_LOOK_SECONDS = 0.5
_default: "MemberRegistry | None" = None  # of the default group, where every process of the job is known
_made: "defaultdict[tuple[str, tuple[int, ...]], int]" = defaultdict(int)


class SeveralHosts(Exception):
    """The ranks of a group are on several hosts; ``nonce``: of the first rank's memory."""

    def __init__(self, nonce: str) -> None:
        super().__init__(nonce)
        self.nonce = nonce


def default_memory() -> Segment | None:
    """The memory of the default group, if that is a group of unisono."""
    return _default.memory() if _default is not None else None


def _short_of(error: OSError | MemoryError) -> bool:
    """True if an error is a limit of this process; a `TimeoutError` is a signal handler's."""
    return isinstance(error, MemoryError) or error.errno in _LIMITS


class MemberRegistry:
    """The announcements of one group.

    ``epoch`` tells the groups of one default group from those of the next over the same store; ``label`` is torch's
    name for the group, ``title`` ours, this process is number ``rank`` of its ``global_ranks``. With
    ``counted``, several groups of the same members are told apart by their number.
    """

    def __init__(
        self,
        store: StoreLike,
        epoch: str,
        label: str,
        title: str,
        global_ranks: Sequence[int],
        rank: int,
        counted: bool,
    ) -> None:
        self._title = title
        self._global_ranks, self._rank, self._label = list(global_ranks), rank, label
        self.counted = counted
        self._silent_until = time.monotonic() + ABSENT_SECONDS
        self._look_at = time.monotonic() + _LOOK_SECONDS
        number = _made[epoch, tuple(global_ranks)] if counted else 0
        self.key = f"{epoch} {label if not counted else list(global_ranks)} {number}"
        """Names the group, alike on all ranks."""
        _made[epoch, tuple(global_ranks)] += counted
        self._announcements = announcements(store, epoch, label)
        self.store = JobStore(store, f"unisono/{epoch}/group/{'-'.join(map(str, global_ranks))}/{number}")
        """The store of this group's ranks."""
        self.hosts: HostMap | None = None
        """The hosts of the group, once it is known that there are several."""
        self.memory: Callable[[], Segment | None] = lambda: None
        """The memory of the default group, if this is its registry."""
        self.expected: Sequence[Identity] = ()
        """The processes of this host that are to be its ranks, where that is known before they announce themselves."""
        if words := unseen():
            raise self._refusal(words)
        # In this order: who reads a name without a process takes it for another group's.
        with self.able():
            note = self._announce("", Identity.mine(), Host.mine().to_text())
            self._announcements.set(str(global_ranks[rank]), json.dumps([self._global_ranks, note]))

    def _announce(self, reason: str, me: Identity, place: str) -> Announcement:
        note = Announcement(me.pid, me.started, place, socket.gethostname(), reason, ticks())
        self.store.set(f"who/{self._rank}", json.dumps(note))
        return note

    @contextmanager
    def able(self) -> Iterator[None]:
        """Publishes an error of the block to the peers: this process may live on."""
        try:
            yield
        except UnisonoError:
            raise
        except (OSError, MemoryError) as error:
            if not _short_of(error):
                raise
            nbytes = show_nbytes(Layout(len(self._global_ranks)).total)
            words = (
                f"can not share the memory of {self._title} ({nbytes}): {error}; raise the limits of its processes "
                "(ulimit -v, -n, -f) or the memory of their container"
            )
            self.cannot_join(words)
            raise UnisonoError(f"rank {self._global_ranks[self._rank]} {words}") from error

    def cannot_join(self, reason: str, cause: str = "") -> None:
        """Publishes that this rank does not join, for ``reason``, a verb phrase; ``cause``: of another rank's fault."""
        try:
            me, place = Identity.mine(), Host.mine().to_text()
        except OSError:
            me, place = Identity(os.getpid(), 0), ""
        with suppress(PeerLostError, OSError):  # then no rank waits
            self._announce(exit_note(reason, cause), me, place)

    def barred(self, pid: int) -> UsageError:
        """Publishes, and returns the error, that this rank may not open the first one's memory, process ``pid``."""
        first = self._global_ranks[0]
        return self._refusal(f"may not open the shared memory of rank {first} (pid {pid}): {barred(pid)}")

    def _refusal(self, words: str) -> UsageError:
        """Publishes, and returns the error, that this rank ``words`` and so does not join."""
        self.cannot_join(words)
        return UsageError(f"rank {self._global_ranks[self._rank]} {words}")

    def serve_all(self, segment: Segment) -> None:
        """Makes this the default group's registry, over its memory: other groups look up absent ranks here."""
        global _default
        _default, self.memory = self, weakref.ref(segment)

    def stands_alone(self) -> bool:
        """True if there is no default group of unisono."""
        return _default is None

    def joins_early(self) -> bool:
        """True for the default group, and for every group if that is on several hosts: the store may be lost later."""
        return not self.counted or (_default is not None and _default.hosts is not None)

    def known_hosts(self) -> HostMap | None:
        """The hosts of the group, if those of the default group are known and these ranks are on several of them."""
        if not self.counted or _default is None or (world := _default.hosts) is None:
            return None
        hosts = HostMap([world.places[name] for name in self._global_ranks], self._rank)
        return hosts if len(hosts.hosts) > 1 else None

    def nonce(self) -> str:
        """A nonce for the memory of a group whose hosts are known, equal on all of them."""
        world = default_memory()
        key = f"{world.nonce if world else ''}/{self.store.prefix}"
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()

    def release(self) -> None:
        """Drops the stores when the group is left; later groups do not look up ranks here."""
        global _default
        if _default is self:
            _default = None
        self._announcements.release()
        self.store.release()

    def identity(self, rank: int) -> Identity:
        """The process of this host announced, here or to the default group, or expected as group rank ``rank``.

        Its pid is 0 if there is none.
        """
        world = self.memory()
        if world is not None and world.longs[world.field(rank, PID)]:
            return world.identity(rank)
        note = self._note(rank)
        if note is not None:
            return note.who if note.here() else Identity(0, 0)
        if self.counted and _default is not None:
            return _default.identity(self._global_ranks[rank])
        return self.expected[rank] if self.expected else Identity(0, 0)

    def gone(self, rank: int) -> Loss:
        """The loss of group rank ``rank``: it published so, ended, or left the default group; else empty."""
        note = self._note(rank)
        if note is not None and not note.here():
            return note.loss(f"rank {self._global_ranks[rank]} (pid {note.pid} on {note.hostname})")
        who = self.identity(rank)
        return self._gone(rank, who, note)._replace(who=who) if who.pid else Loss("")

    def _gone(self, rank: int, who: Identity, note: Announcement | None) -> Loss:
        dead, state, left = not alive(who), ABSENT, Loss("")
        world = _default.memory() if self.counted and _default is not None else None
        name = self._global_ranks[rank]
        if world is not None and name < world.layout.world_size and world.identity(name) == who:
            state, left = world.state(name), read_exit_note(world.text(name, EXIT_NOTE))
        start = f"rank {name} (pid {who.pid} on {socket.gethostname()})"
        if note is not None and note.reason:
            return note.loss(start)
        if dead:
            return Loss(f"{start} is dead{'; it ' + left.words if left.words else ': ' + fate(who)}", left.cause)
        if state == LEFT:
            return Loss(f"{start} {left.words}", left.cause)
        replaced = state == JOINED and own_page().replaced(who)
        # One that has left in the meantime has no page for that reason.
        return Loss(f"{start} {REPLACED}") if replaced and world and world.state(name) == JOINED else Loss("")

    def spans_hosts(self) -> bool:
        """True if a rank was announced from another host."""
        return any(note and not note.here() for note in map(self._note, range(len(self._global_ranks))))

    def elsewhere(self, nonce: str) -> None:
        """Raises `SeveralHosts`: the first rank has made its memory, of this ``nonce``, on another host."""
        raise SeveralHosts(nonce)

    def check_claim(self) -> None:
        """Raises `UsageError` if another process was announced as this rank since; in that one, too, if it waits."""
        note, mine = self._note(self._rank), Identity.mine()
        if note is None:
            return
        twice = self._claimed(note.who, note.place)
        if (note.who, note.place) != (mine, Host.mine().to_text()):
            self.publish_claim(note.who, note.place)
            pid, hostname = note.pid, note.hostname
        elif (other := self._read(self.store, twice)) is not None:
            pid, hostname = other
        else:
            return
        raise claimed_twice(self._global_ranks[self._rank], self._title, pid, hostname)

    def publish_claim(self, other: Identity, place: str = "") -> None:
        """Publishes to another process that this one claims its rank too, see `check_claim`; ``place``: its host, this
        one if empty.
        """
        self.store.set(
            self._claimed(other, place or Host.mine().to_text()), json.dumps([os.getpid(), socket.gethostname()])
        )

    def _claimed(self, who: Identity, place: str) -> str:
        return f"twice/{self._rank}/{who.pid}/{who.started}/{place}"

    def report_absent(self) -> None:
        """Logs once, some seconds after a default group began to be made, which ranks have not come.

        They are named, too, by the error of a store that is lost later.
        """
        if self.counted or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            absent = not_met(self.absent())
        except RuntimeError:  # of the store: the next call on it raises the error
            return
        self.store.before = f" while {name_ranks(absent)} had not come" if absent else ""
        if self._silent_for_long() and absent:
            log_absent(self._me(), absent, ABSENT_SECONDS)

    def report_claim(self, nonce: str) -> None:
        """Logs once, as late, that the ranks which meet in memory ``nonce`` have another process for this one.

        No error: they may be of an earlier attempt, on a host whose processes can not be looked up here.
        """
        if self.store.check([f"claimed/{self._rank}/{nonce}"]) and self._silent_for_long():
            logging.getLogger("unisono").warning(
                "%s: another process, on another host, has joined as rank %d. Give every process its own rank; this "
                "one waits for the job to be started again", self._me(), self._rank,
            )  # fmt: skip

    def _silent_for_long(self) -> bool:
        """True once, `ABSENT_SECONDS` after a default group began to be made."""
        if self.counted or not self._silent_until or time.monotonic() <= self._silent_until:
            return False
        self._silent_until = 0.0
        return True

    def _me(self) -> str:
        return f"rank {self._rank} of {len(self._global_ranks)} (pid {os.getpid()} on {socket.gethostname()})"

    def absent(self) -> list[int]:
        """The global ranks that have not made this group."""
        return [name for rank, name in enumerate(self._global_ranks) if self._note(rank) is None]

    def check(self) -> None:
        """Raises `MismatchError` if a rank made another group in place of this one.

        `PeerLostError` if the first, which makes the group's memory, is gone.
        """
        first = self.gone(0)
        if words := self.mismatch():
            raise MismatchError(words)
        self.check_claim()
        self.report_absent()
        if first.words:
            me = self._global_ranks[self._rank]
            causes = self._reasons_not_to_join() or [first]
            raise lost(f"rank {me} can not join group {self._label} {self._global_ranks}", causes)

    def check_reasons(self) -> None:
        """Raises `PeerLostError` if a rank has published why it does not join."""
        if causes := [cause for cause in self._reasons_not_to_join() if cause.words]:
            raise lost(f"group {self._label} {self._global_ranks} can not be joined", causes)

    def _reasons_not_to_join(self) -> list[Loss]:
        """The losses of ranks that have published why they do not join: the first rank may have ended over these."""
        notes = [(rank, self._note(rank)) for rank in range(len(self._global_ranks)) if rank != self._rank]
        return [self.gone(rank) for rank, note in notes if note is not None and note.reason]

    def late(self) -> CollectiveTimeout:
        """The error if the first rank of a default group does not join in time."""
        absent = self.absent()
        with suppress(RuntimeError):  # of the store
            absent = not_met(absent) or absent  # who waits in torch's rendezvous waits for others
        names = ", ".join(map(str, absent)) or "0"
        return CollectiveTimeout(
            f"rank {self._rank} of {len(self._global_ranks)} found no shared memory within its timeout: rank "
            f"{names} did not join. Are all started, with the same address, port or file?"
        )

    def mismatch(self) -> str:
        """Words on ranks that made other groups at the point where this rank made this one; else empty."""
        me = self._global_ranks[self._rank]
        others = {name: made for name in self.absent() if (made := self._named(name)) and made[0] != self._global_ranks}
        if not others:
            return ""
        if not self.counted:
            words = [f"rank {k} (pid {note.pid} on {note.hostname}) with {len(r)}" for k, (r, note) in others.items()]
            mine = f"rank {me} (pid {os.getpid()} on {socket.gethostname()})"
            size = len(self._global_ranks)
            return f"{mine} was started with world_size {size}, {', '.join(words)}: give all ranks the same"
        lines = [f"\n  rank {name} made one of {ranks}" for name, (ranks, _) in others.items()]
        return (
            f"new_group was not called alike on all ranks: where rank {me} made a group of {self._global_ranks} (named "
            f"{self._label!r}),{''.join(lines)}\nEvery rank must make every group, in one order, with the same ranks."
        )

    def _note(self, rank: int) -> Announcement | None:
        """The announcement of group rank ``rank`` since the job was started, if any."""
        found = self._read(self.store, f"who/{rank}")
        return fresh(found) if found else None

    def _named(self, name: int) -> tuple[list[int], Announcement] | None:
        """The group that global rank ``name`` made under this one's name since the job was started, if any."""
        found = self._read(self._announcements, str(name))
        note = fresh(found[1]) if found else None
        return (found[0], note) if found and note else None

    def _read(self, store: JobStore, key: str) -> list[Any] | None:
        try:
            return json.loads(store.get(key)) if store.check([key]) else None
        except PeerLostError:
            return None
        except OSError as error:
            if not _short_of(error):
                raise
            return None
