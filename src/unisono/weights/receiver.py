"""`Receiver`: a replica's side of a meeting. It pulls versions, or follows in a thread; threads hold the one shown."""

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Self

import torch

from unisono.errors import CollectiveTimeout, PeerLostError, UsageError
from unisono.transport.process import OwnThread
from unisono.weights.arguments import check_version, flag, seconds_of
from unisono.weights.checksum import show_checksum
from unisono.weights.joining import Joining
from unisono.weights.participant import Again, SenderLeft
from unisono.weights.plan import Plan
from unisono.weights.receiving import Receiving
from unisono.weights.rules import Rule, rules_to_text
from unisono.weights.sharding import Sharding, check_sharding
from unisono.weights.side import Side, check_rules
from unisono.weights.update import Report, Update
from unisono.weights.wire import Broken, Connection, Message

__all__ = ["Receiver"]

_log = logging.getLogger("unisono")
_made = 0
_ENDLESS = 1e9  # s
_AFTER_ERROR = 0.1  # s that a thread which follows waits before it tries again


class Receiver:
    """A replica's side. See docs/weights.md.

    address: the sender's. engine: a module, a mapping of names to tensors, or an `Engine`. rules: applied after the
    sender's. shard: see `layout`. name: of the replica in reports and errors (default host:pid); one that joins under
    the name of a dead one replaces it. group: the side's ranks. mapped: the tensors become views of one copy that all
    mapped replicas of the host share. timeout: seconds.

    Returns once the replica has joined, if a sender is there. Raises `UsageError` for an argument out of range.
    """

    def __init__(
        self,
        address: Any,
        engine: Any,
        *,
        rules: Sequence[Rule] = (),
        shard: Sharding | None = None,
        name: str | None = None,
        group: Any = None,
        mapped: bool = False,
        timeout: float = 60.0,
    ) -> None:
        check_sharding(shard)
        seconds, rules_text = seconds_of(timeout, zero=False), rules_to_text(check_rules(rules))
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable()):
            raise UsageError(f"name={name!r}: expected a text of 1 to 200 printable characters")
        side = Side(group)
        name, instance = side.of_first((name or _default_name(), secrets.token_hex(8)), "Receiver")
        self._timeout = seconds
        self._part = Receiving(engine, shard, name, flag(mapped, "mapped"), side.rank)
        self._joining = Joining(
            address,
            self._part,
            name=name,
            instance=instance,
            rank=side.rank,
            world_size=side.world_size,
            rules=rules_text,
            mapped=mapped,
        )
        self._pulling = threading.Lock()
        self._puller = 0
        self._follower: OwnThread | None = None
        self._news = threading.Condition()
        self._outcomes = 0
        self._outcome: Report | BaseException | None = None
        self._closed = False
        self.error: BaseException | None = None
        """What the thread that follows has met last; None after a version that was shown."""
        self._end = weakref.finalize(self, _leave, self._joining)
        self._joining.try_once()

    # Pulling

    def pull(self, version: int | None = None, *, background: bool = False, timeout: float | None = None) -> Any:
        """Takes part in the push that waits for this replica, or in the next; returns a `Report` once it is shown.

        version: returns at once if this version, or a later one, is shown, and else takes versions until one is.
        background: returns an `Update` at once. timeout: seconds, in place of the receiver's.

        Raises `UsageError`, `MismatchError`, `UpdateError`, `CorruptionError`, `PeerLostError`, `CollectiveTimeout`,
        and what the engine raises; this replica then keeps what it shows.
        """
        self._check_open()
        check_version(version)
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        if not flag(background, "background"):
            self._check_idle("pull")
            if self._follower is threading.current_thread():
                raise UsageError("pull was called in the thread that follows, which it would wait for: leave it out")
            if self._part.holds_of.mine:
                raise UsageError(
                    "pull was called inside a hold of this thread, which it would wait for: leave the hold first"
                )
        if background:
            return Update(lambda: self._pull(version, seconds, waits=False), "pull")
        return self._pull(version, seconds, waits=True)

    def _pull(self, version: int | None, seconds: float, waits: bool) -> Report:
        deadline = time.monotonic() + seconds
        if self._follower is not None:
            return self._from_follower(version, deadline)
        if not self._pulling.acquire(timeout=seconds):
            raise CollectiveTimeout(f"another pull of this replica has not ended after {seconds:g} s")
        try:
            self._puller = threading.get_ident()
            return self._until(version, deadline, waits)
        finally:
            self._puller = 0
            self._pulling.release()

    def _until(self, version: int | None, deadline: float, waits: bool) -> Report:
        """Takes versions until one is at least ``version``. ``waits``: the caller's thread does until then."""
        part = self._part
        while True:
            shown = part.holds_of.version
            if version is not None and shown is not None and shown >= version:
                return part.last_report(shown)
            report = self._next_version(deadline, waits)
            if version is None or report.version >= version:
                return report

    def _next_version(self, deadline: float, waits: bool) -> Report:
        part = self._part
        with torch.inference_mode(False), torch.no_grad():
            while True:
                try:
                    self._joining.join(deadline)
                    announced = self._announced(deadline, waits)
                    part.settle(announced, deadline)
                    began = time.monotonic()
                    part.take_part(announced, deadline, {"bases": part.bases()})
                    return part.report(announced, time.monotonic() - began)
                except (SenderLeft, Again):
                    continue
                except Broken:
                    words = part.lead.end() if part.lead is not None else "its connection ended"
                    lead = part.lead
                    part.disconnect()
                    raise PeerLostError(
                        f"sender rank 0 ({lead}): {words}, while this replica waited for it; {part.kept()}"
                    ) from None

    def _announced(self, deadline: float, waits: bool) -> Message:
        """The announcement of an update that is still under way. ``waits``: as `_until` has it."""
        connection = self._part.connection
        assert connection is not None
        found: Message | None = None
        while (message := connection.receive()) is not None:
            if message.kind == "announce":
                found = message
            elif message.kind == "abort":  # that push was given up before this pull
                found = None
            else:
                self._check_left(message)
        if found is None and waits:
            with self._part.waiting():
                return self._next_announced(connection, deadline)
        return found or self._next_announced(connection, deadline)

    def _next_announced(self, connection: Connection, deadline: float) -> Message:
        while True:
            message = connection.wait(deadline, self._joining.waker)
            if message is None:
                self._joining.check_open()
                raise self._part.late(0, None)
            self._check_left(message)
            if message.kind == "announce":
                return message

    def _check_left(self, message: Message) -> None:
        if message.kind == "bye":
            self._part.disconnect()
            raise SenderLeft(message.get("words", ""))

    def _from_follower(self, version: int | None, deadline: float) -> Report:
        """Waits for the thread that follows."""
        with self._news:
            seen = self._outcomes
            while True:
                shown = self._part.holds_of.version
                if version is not None and shown is not None and shown >= version:
                    return self._part.last_report(shown)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CollectiveTimeout(
                        f"the thread that follows has not shown {_named(version)} in time; {self._part.kept()}"
                    )
                self._news.wait(min(left, 3600.0))
                self._check_open()
                if self._outcomes != seen:
                    seen = self._outcomes
                    outcome = self._outcome
                    if isinstance(outcome, BaseException):
                        raise outcome
                    if version is None and outcome is not None:
                        return outcome

    # Following

    def follow(
        self,
        on_update: Callable[[Report], object] | None = None,
        on_error: Callable[[Exception], object] | None = None,
    ) -> None:
        """Takes every version in a thread, until `close`; returns at once.

        on_update: called with each report, after its version is shown. on_error: with each exception; the thread goes
        on, and `error` has it.
        """
        self._check_open()
        if self._follower is not None:
            raise UsageError("this receiver follows already")
        for name, given in (("on_update", on_update), ("on_error", on_error)):
            if given is not None and not callable(given):
                raise UsageError(f"{name}={given!r}: expected a function of one argument, or None")
        self._part.holds_of.used = True  # from now on versions are shown while others read
        self._follower = OwnThread(
            target=_follow, args=(weakref.ref(self), on_update, on_error), name="unisono weights follow", daemon=True
        )
        self._follower.start()

    def _outcome_of_pull(self) -> Report | BaseException:
        try:
            self._check_open()  # a function given to follow may have closed it
            with self._pulling:
                self._puller = threading.get_ident()
                try:
                    return self._until(None, time.monotonic() + _ENDLESS, waits=False)
                finally:
                    self._puller = 0
        except BaseException as error:
            if not self._closed:
                _log.error("%s", error)
            return error

    def _publish(self, outcome: Report | BaseException) -> None:
        with self._news:
            self.error = outcome if isinstance(outcome, BaseException) else None
            self._outcome, self._outcomes = outcome, self._outcomes + 1
            self._news.notify_all()

    # What is shown

    def hold(self) -> AbstractContextManager[int | None]:
        """No tensor changes within; yields the version shown, None if there is none yet. Holds nest."""
        self._check_open()
        return self._part.holds_of.hold()

    @property
    def version(self) -> int | None:
        """The version shown, None if there is none (yet), or none that is whole."""
        return self._part.holds_of.version

    @property
    def plan(self) -> Plan | None:
        """The plan of the last update, None before the first."""
        return self._part.plan

    def checksums(self) -> dict[str, str]:
        """The checksums of the version shown, 16 hexadecimal digits, by name, of whole tensors.

        Raises `UsageError` before the first version, or where the sender has ``checksum=False``.
        """
        self._check_open()
        return {name: show_checksum(value) for name, value in self._part.totals().items()}

    def verify(self) -> None:
        """Compares the checksums of the live tensors with those of the version shown.

        Raises `CorruptionError` with the tensors that differ, `UsageError` if there is nothing to compare with.
        """
        self._check_open()
        with self._part.holds_of.hold(counts=False):
            self._part.verify()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Leaves; the thread that follows ends. The version shown stays.

        Raises `UsageError` in an engine's load or commit, which are part of the update that would have to end first.
        """
        if self._closed:
            return
        self._check_idle("close")
        self._closed = True
        self._joining.interrupt()
        if self._follower is not None and self._follower is not threading.current_thread():
            self._follower.join(self._timeout)
        with self._pulling, suppress(Broken):
            self._end()
        with self._news:
            self._news.notify_all()

    def _check_idle(self, what: str) -> None:
        if self._puller == threading.get_ident():
            raise UsageError(
                f"{what} was called in load or commit, within the update that it would wait for: do it later"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this receiver at {self._joining.address} was closed: make another")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _leave(joining: Joining) -> None:
    """Ends a receiver, at the latest with its process."""
    joining.leave()


def _named(version: int | None) -> str:
    return "a version" if version is None else f"version {version}"


def _default_name() -> str:
    global _made
    _made += 1
    return f"{socket.gethostname()}:{os.getpid()}" + (f"#{_made}" if _made > 1 else "")


def _follow(own: "weakref.ref[Receiver]", on_update: Any, on_error: Any) -> None:
    """The thread that follows; it ends with its receiver."""
    while (receiver := own()) is not None:
        outcome = receiver._outcome_of_pull()
        if receiver.closed:
            return
        receiver._publish(outcome)
        try:
            if isinstance(outcome, Report):
                if on_update is not None:
                    on_update(outcome)
            elif on_error is not None:
                on_error(outcome)
        except Exception:
            _log.exception("a function given to follow has raised")
        if not isinstance(outcome, Report):
            time.sleep(_AFTER_ERROR)
        del receiver
