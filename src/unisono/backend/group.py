"""One rank's membership in one group: the shared memory, its two queues, joining and leaving."""

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from unisono.backend import exit_hooks, left_open
from unisono.backend.birth import births, claimed_twice, local_store, publish_self, ranks_here
from unisono.backend.data_ops import DataOps
from unisono.backend.fast_path import FastPath
from unisono.backend.first_call import FirstCall
from unisono.backend.member_registry import MemberRegistry, SeveralHosts
from unisono.backend.options import Options, between_hosts, host_timeout
from unisono.backend.over_hosts import FLUSH, OverHosts
from unisono.backend.reduce_ops import ReduceOps
from unisono.backend.stores import keep_inherited
from unisono.errors import CollectiveTimeout, MismatchError, UnisonoError, UsageError, first_line
from unisono.runtime.collectives import CollectiveQueue
from unisono.runtime.messages import MessageQueue
from unisono.runtime.task import copy_error, reentry_error
from unisono.transport.board import Board
from unisono.transport.layout import ABSENT, AFFINITY, EXIT_NOTE, JOINED, LEFT, NAME, PID, STATE
from unisono.transport.process import Identity, affinity_mark
from unisono.transport.segment import Founder, Segment, attach, create
from unisono.transport.shared_heap import announce
from unisono.units import name_ranks
from unisono.watch.device_guard import DeviceGuard
from unisono.watch.exit_notes import exit_note, lost, read_exit_note
from unisono.watch.monitor import GroupMonitor
from unisono.watch.status_page import close_own_page, own_page

__all__ = ["Group", "Operations", "forget_failure", "given"]

given: list["Group"] = []
"""The group that torch is being given by `shrink`, if it is."""

_living: "weakref.WeakSet[Group]" = weakref.WeakSet()
_ENDED = "ended (its program came to an end, at its last line or by sys.exit) without destroy_process_group"
_page_lock = threading.RLock()  # held while the own page is opened or closed
_last_failure: UnisonoError | None = None  # the failure of a group of this process, until the next one is made


class Operations(DataOps, ReduceOps):
    """Builds every operation."""


class Group:
    """Ranks that share a segment.

    The first rank makes it at once; the others map it with their first call, so that making a group costs next to
    nothing and never waits. `join` is that first call; the default group is joined when it is made.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        label: str,
        timeout: float,
        members: MemberRegistry,
        options: Options | None,
    ) -> None:
        self.rank, self.size, self.global_ranks, self.timeout = rank, len(global_ranks), list(global_ranks), timeout
        self.label, self.key, self._members, self.options = label, members.key, members, options
        self.messages: MessageQueue
        self.collectives: CollectiveQueue
        self.operations: Operations
        self.fast_path: FastPath
        self.device_guard: DeviceGuard
        self.monitor: GroupMonitor
        self._store = members.store
        self.ranks_here = list(range(self.size))
        """The group ranks on this machine; known once `wait_for_all` has returned."""
        self._over_hosts = OverHosts(members, rank, self.global_ranks, label)
        self._segment: Segment | None = None
        self._fd = -1
        self.flush = FLUSH
        """Seconds that sending what is left to other hosts may take when the group is left."""
        self.joined, self._closed = False, ""
        self.joins_described = False
        """Whether it is joined as soon as torch has given it its description, not with its first call."""
        self._joining = threading.RLock()
        forget_failure()
        if rank == 0 and not self._over_hosts.known:
            with members.able():
                self._segment, self._fd = create(self._store, self.size, label)
        _living.add(self)
        exit_hooks.call_at_exit(_leave_all)

    def join(self, op: str = "") -> None:
        """Maps the segment if that is still to be done, for call ``op``; raises if the group is closed."""
        global _last_failure
        if self._joining._is_owned():  # type: ignore[attr-defined]
            raise reentry_error("a call", self.label)
        with self._joining:
            if not self.joined:
                try:
                    with self._members.able():
                        self._join(op)
                except UnisonoError as error:
                    _last_failure = copy_error(error)  # those that wait for this rank read why it does not join
                    raise
                finally:
                    if self._closed:
                        self._members.release()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self.label} can not be used any more: this rank {self._closed}")

    def _join(self, op: str) -> None:
        self._refuse_if_closed()
        segment = self._segment = self._segment or self._attach(op)
        segment.absentees = self._members
        with self._or_notify(), _page_lock:
            own_page()  # first: a rank that has joined can be asked for its stacks
        self._claim(segment)  # if that fails another process is this rank
        if self._members.counted:
            self._over_hosts.look(segment, self.timeout)
        elif not self._over_hosts.known:
            self._wait_for_all()
        with self._or_notify():
            self._make_queues(segment)
        self.joined = True
        if self._closed:  # by a signal handler, meanwhile
            self.joined = False
            self._publish_left(segment, _exit_note(self._closed))
        self._refuse_if_closed()

    @contextmanager
    def _or_notify(self) -> Iterator[None]:
        """Publishes a failure of the block: the peers must not wait for this rank."""
        try:
            yield
        except BaseException as error:
            words = f"could not join it ({type(error).__name__}: {error})"
            self._members.cannot_join(words)
            self.close(words)
            raise

    def _make_queues(self, segment: Segment) -> None:
        self._over_hosts.connect(segment, self.timeout, host_timeout(self.options), between_hosts(self.options))
        board = Board(segment, self.rank)
        announce(segment, self.rank)
        monitor = GroupMonitor(board, self.global_ranks, self.label)
        self.collectives = CollectiveQueue(board, self.global_ranks, self.label, monitor)
        preparer = self.collectives.preparer
        self.operations = Operations(preparer, self.global_ranks, segment.oversubscribed, self.options)
        self.fast_path = FastPath(self.operations, preparer)
        self.messages = MessageQueue(segment, self.rank, self.global_ranks, self.label, monitor)
        self.collectives.rejected = self.messages.rejected
        self.device_guard, self.monitor = DeviceGuard(board, self.global_ranks, self.label, monitor), monitor
        self.nonce = segment.nonce
        self._over_hosts.start(monitor.serve)

    def _attach(self, op: str) -> Segment:
        """The segment, once the first rank has made it; raises if it never will, or not in time."""
        deadline = time.monotonic() + self.timeout
        if (segment := self._over_hosts.attach(deadline)) is not None:
            return segment
        first_call: Founder = self._members
        if op:
            first, me = self.global_ranks[0], self.global_ranks[self.rank]
            first_call = FirstCall(self._members, op, self.label, first, me, self.timeout)
        try:
            while True:
                try:
                    return attach(self._store, self.rank, self.size, deadline, first_call)
                except SeveralHosts as found:
                    nonce = found.nonce
                if (segment := self._over_hosts.attach(deadline, nonce)) is not None:
                    return segment
                if time.monotonic() > deadline:
                    raise first_call.late()
                time.sleep(0.02)
        finally:
            if isinstance(first_call, FirstCall):
                first_call.end()

    def _claim(self, segment: Segment) -> None:
        """Enters this process as the group's rank; raises `UsageError` if another process has done so."""
        mine, at = Identity.mine(), segment.field(self.rank, PID)
        if self._store.add(f"claimed/{self.rank}/{segment.nonce}", 1) > 1:
            other = segment.identity(self.rank)
            self._members.publish_claim(other)
            raise claimed_twice(self.global_ranks[self.rank], self.label, other.pid, socket.gethostname())
        segment.longs[segment.field(self.rank, NAME)] = self.global_ranks[self.rank]
        segment.longs[segment.field(self.rank, AFFINITY)] = affinity_mark()
        segment.longs[at], segment.longs[at + 1], segment.longs[at + 2] = mine.pid, mine.started, JOINED

    def serve_all(self) -> None:
        """Makes the ranks of this group, the default one, known to the other groups of this process."""
        assert self._segment is not None
        self._members.serve_all(self._segment)

    def wait_for_all(self) -> None:
        """Returns once every rank has joined; raises `CollectiveTimeout` naming those that have not.

        Whatever it raises, the group is left.
        """
        try:
            with self._members.able():
                local = publish_self(self._store, self.rank, serves=self.rank == 0 and not self._members.counted)
                self.join()
                born = births(self._store, self.global_ranks, self.label)
                self.ranks_here = ranks_here(born, self.rank)
                if (segment := self.segment) is not None and not self._over_hosts.known:
                    ranks = range(self.size)
                    segment.store = local_store(
                        self._store, self.rank, self.size, self.nonce, born[0].address, local,
                        left=lambda: any(segment.state(rank) == LEFT for rank in ranks),
                    )  # fmt: skip
        except BaseException as error:
            if self._over_hosts.known:  # other hosts do not see in memory that this rank has left
                self._members.cannot_join(f"could not join it ({type(error).__name__}: {first_line(error)})")
            self.close(f"could not join it ({type(error).__name__}: {error})")
            raise

    def _wait_for_all(self) -> None:
        segment, deadline, pause = self._segment, time.monotonic() + self.timeout, 0.0005
        assert segment is not None
        while True:
            missing = [name for r, name in enumerate(self.global_ranks) if segment.state(r) == ABSENT]
            if not missing:
                break
            self._refuse_if_closed()
            if pause >= 0.02:
                if self._over_hosts.found(segment, deadline):
                    return
                self._check_missing(segment)
            if time.monotonic() > deadline:
                there = [n for n in self.global_ranks if n not in missing]
                raise CollectiveTimeout(
                    f"{self.label}: {name_ranks(missing)} did not join within "
                    f"{self.timeout:g} s (world size {self.size}; joined: {', '.join(map(str, there))})"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _check_missing(self, segment: Segment) -> None:
        """Raises `PeerLostError` if a rank has died before it joined, `MismatchError` if it waits in another group."""
        absent = [rank for rank in range(self.size) if segment.state(rank) == ABSENT]
        gone = [(rank, loss) for rank in absent if (loss := self._members.gone(rank)).words]
        if losses := [loss for rank, loss in gone if segment.state(rank) == ABSENT]:
            raise lost(f"{self.label} can not be joined", losses)
        if words := self._members.mismatch():
            raise MismatchError(words)
        self._members.check_claim()
        self._members.report_absent()

    def _forget_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def segment(self) -> Segment | None:
        """The memory that its ranks share; None before this rank has joined and after it has left."""
        return self._segment if self.joined else None

    def close(self, why: str = "has left the group (destroy_process_group)", failing: bool = False) -> None:
        """Leaves the group: peers that still wait for this rank read ``why``; calls under way end with an error.

        ``failing``: the program ends by an error, so calls left undone are not reported.
        """
        if self._closed:
            return
        self._closed = why
        words = _exit_note(why)
        try:
            if self.joined:
                self._close_queues(UnisonoError(f"{self.label}: this rank {why} while the call was under way"), failing)
        finally:
            self._release(words)

    def _release(self, words: str) -> None:
        segment = self._segment
        self._over_hosts.leave(words, self.flush)
        if self.joined and segment is not None:
            self.joined = False
            del self.collectives, self.messages, self.operations, self.fast_path, self.device_guard, self.monitor
            self._publish_left(segment, words)
        else:
            self._leave_unjoined(words)
        if self._fd >= 0 and segment is not None and self._members.counted:
            left_open.keep(self._fd, segment, self._members)
            self._fd = -1
        self._forget_fd()
        self._over_hosts.forget_fd()
        self._segment = None
        if not self._joining._is_owned() and self._joining.acquire(blocking=False):  # type: ignore[attr-defined]
            self._members.release()  # else the joining thread does so
            self._joining.release()
        _living.discard(self)
        left_open.close_joined(alone=not _living)
        _close_own_page_if_alone()

    def __del__(self) -> None:
        """Leaves a group to which there is no reference any more."""
        self.close("has dropped the group without destroy_process_group")

    def _close_queues(self, error: UnisonoError, failing: bool) -> None:
        self.collectives.close(error)
        if not self.collectives.entered():  # a call that this one interrupts may be reading there
            self.collectives.mappings.forget()
        self.messages.close(error)
        self._log_refusals()
        for words in () if failing or self.messages.entered() else self.messages.lost():
            logging.getLogger("unisono").warning("%s", words)

    def _log_refusals(self) -> None:
        """Logs rejections that no call has raised; an error here would leave torch half way out of the group."""
        refusals = self.messages.rejected
        while refusals is not None and (found := refusals.take()):
            logging.getLogger("unisono").error("%s", found[0])

    def _publish_left(self, segment: Segment, words: str) -> None:
        segment.set_text(self.rank, EXIT_NOTE, words)
        segment.longs[segment.field(self.rank, STATE)] = LEFT

    def _leave_unjoined(self, words: str) -> None:
        """Leaves a group in which this rank can make no call, so that peers neither wait nor keep memory for it."""
        if self._members.counted and self._segment is None:
            left = read_exit_note(words)  # published first: the memory may be made at any time, by a rank that reads it
            self._members.cannot_join(left.words, left.cause)
        # Suppressed: the group's memory, or the store, is gone, or elsewhere, and so are those who would read of it.
        with suppress(UnisonoError, OSError, SeveralHosts):
            segment = self._segment or attach(self._store, self.rank, self.size, 0.0, self._members)
            if segment.state(self.rank) == ABSENT or segment.identity(self.rank) == Identity.mine():
                self._publish_left(segment, words)

    def disown(self) -> None:
        """Forgets the group without an exit note: it belongs to the parent of this forked process."""
        self._closed = (
            "was forked: the group belongs to the process that this one was forked from; make a group of its own"
        )
        if self.joined:
            self.joined = False
            self.collectives.disown()
            self.messages.disown()
            del self.collectives, self.messages, self.operations, self.fast_path, self.device_guard, self.monitor
        self._joining, self._segment = threading.RLock(), None
        self._members.release()
        self._forget_fd()
        self._over_hosts.disown()


def forget_failure() -> None:
    """Groups left from now on are not left over the failure of one that was left before."""
    global _last_failure
    _last_failure = None


def _close_own_page_if_alone() -> None:
    """Closes this process's page if it is in no group."""
    with _page_lock:
        if not _living:
            close_own_page()


def _exit_note(why: str) -> str:
    """``why`` and what has gone wrong in a group of this process: peers in its other groups read why it leaves."""
    global _last_failure
    queues = [queue for group in _living if group.joined for queue in (group.collectives, group.messages)]
    errors = [error for queue in queues if (error := queue.failed or queue.lost_over) is not None]
    _last_failure = next((error for error in errors if error.cause), errors[0] if errors else _last_failure)
    if _last_failure is None:
        return exit_note(why)
    words = first_line(_last_failure)
    return exit_note(why if words in why else f"{why} after an error: {words}", _last_failure.cause)


def _leave_all(words: str) -> None:
    """Leaves all groups at exit: ends workers, publishes exit notes."""
    for group in list(_living):
        with suppress(Exception):  # a group that can not be left must not keep the others
            group.close(words or _ENDED, failing=bool(words))
    close_own_page()


def _disown() -> None:
    """Forgets all groups in a forked child: they belong to the parent."""
    global _last_failure, _page_lock
    _last_failure, _page_lock = None, threading.RLock()
    keep_inherited()  # first: a group that is disowned lets its store go
    left_open.disown()
    for group in list(_living):
        group.disown()


os.register_at_fork(after_in_child=_disown)
