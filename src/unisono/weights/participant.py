"""One rank's part in an update, as the sender's rank 0 leads it (lead.py): what it reports, and what it then does."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono import errors
from unisono.errors import (
    CollectiveTimeout,
    CorruptionError,
    MismatchError,
    PeerLostError,
    UnisonoError,
    UpdateError,
    kind_and_text,
)
from unisono.runtime.loops import CHECKSUM, loops, wanted
from unisono.transport.process import OwnThread
from unisono.weights.lineup import Lineup, group_apart, group_here, left
from unisono.weights.movement import Movement
from unisono.weights.relay import Relay
from unisono.weights.terms import GroupFailed, Terms
from unisono.weights.wire import Broken, Connection, Message, Who

__all__ = ["Again", "Participant", "SenderLeft", "given_up", "marked"]

E = TypeVar("E", bound=UnisonoError)
T = TypeVar("T")

_VERDICT = 2.0  # s that the lead may take to say why the group failed
_ANSWER = 1.0
_LATER = 0.5  # s after an update's time at which calls of its group end
_BUSY = 60.0  # s that a thread may take to load what has arrived


class SenderLeft(Exception):
    """The sender has closed: the next one may come."""


class Participant(ABC):
    """A rank that takes part in updates."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.lead: Who | None = None
        """The process of the sender's rank 0."""
        self.instance = ""
        """Names the sender."""
        self.lineup: Lineup | None = None
        self.movement: Movement | None = None
        self._group: Any = None
        self._store: Any = None
        self._sent = ""  # the signature that the lead knows
        if wanted():
            loops.kept(CHECKSUM)  # loaded now, not within the time of an update

    # What a side does

    @abstractmethod
    def holds(self) -> tuple[str, str]:
        """Looks at what this rank holds: its signature, its description."""

    @abstractmethod
    def fitted(self, movement: Movement) -> None:
        """A new line-up is there."""

    @abstractmethod
    def move(self, terms: Terms, announced: Message, bases: list[Any]) -> tuple[dict[str, int], bytes]:
        """Moves the data; returns what the report says, and the shares of checksums."""

    @abstractmethod
    def forget(self) -> None:
        """The update is off."""

    @abstractmethod
    def show(self, announced: Message, decided: Message, deadline: float) -> None:
        """The update is decided."""

    @abstractmethod
    def kept(self) -> str:
        """Words on the version that stays."""

    def doing(self) -> str:
        """Words on what this rank is at, for the others."""
        return ""

    # The conversation

    def take_part(self, announced: Message, deadline: float, ready: dict[str, Any] | None) -> Message:
        """From the announcement until the version is shown; returns the decision. Raises what gave the update up.

        ready: what is reported first, unless the lead knows this rank to be; None: at a sender, where nothing is shown.
        """
        number, version = announced["number"], announced["version"]
        moved = False
        failure: GroupFailed | None = None
        try:
            if ready is not None and not announced["ready"]:
                data, described = self.description()
                self.send("ready", data, number=number, **described, **ready)
            while True:
                message = self._next(deadline, number, version, failure)
                if message.get("number") != number:
                    continue
                if message.kind == "abort":
                    raise given_up(message, version, self.kept)
                if message.kind == "fit":
                    failure = None
                    if moved:
                        self.forget()
                    self._fit(message, number, left(deadline))
                elif message.kind == "go":
                    moved = True
                    failure = self._move(message, announced, deadline)
                elif message.kind == "decide":
                    moved = False
                    self.show(announced, message, deadline)
                    if ready is not None:
                        self.send("shown", number=number, version=version)
                    return message
        except (Broken, SenderLeft) as end:
            words = self._lead_lost(end, version)
            self.disconnect()
            raise PeerLostError(words) from None
        except BaseException as error:
            if not getattr(error, "from_lead", False):
                self.report_failure(number, error)
                error.add_note(self._outcome(version))
            raise
        finally:
            if moved:
                self.leave_group()
                self.forget()

    def send(self, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Sends to the lead. Raises `Broken`."""
        if self.connection is None:
            raise Broken("not connected")
        self.connection.send(kind, data, **fields)

    def description(self) -> tuple[bytes, dict[str, Any]]:
        """What this rank holds, for a message to the lead: the text, unless that is known there, and its signature."""
        signature, text = self.holds()
        known = signature == self._sent
        self._sent = signature
        return b"" if known else text.encode(), {"signature": signature}

    def _next(self, deadline: float, number: int, version: int, failure: GroupFailed | None) -> Message:
        """The next message. Raises `CollectiveTimeout` at ``deadline``, with what the lead knows."""
        assert self.connection is not None
        late = time.monotonic() >= deadline
        limit = deadline if failure is None or late else time.monotonic() + _VERDICT
        message = self.connection.wait(limit)
        if message is not None:
            return self.checked(message)
        if failure is None or late:
            raise self.late(number, version)
        raise marked(UpdateError(f"{failure}; {self._outcome(version)}"))

    def checked(self, message: Message) -> Message:
        """The message. Raises `SenderLeft` for the sender's goodbye."""
        if message.kind == "bye":
            raise SenderLeft(message.get("words", ""))
        return message

    def late(self, number: int, version: int | None) -> CollectiveTimeout:
        """The error of a wait that took too long, with the lead's words on who is missing."""
        text = ""
        with suppress(Broken, SenderLeft):
            self.send("late", number=number)
            limit = time.monotonic() + _ANSWER
            while not text and self.connection is not None:
                message = self.connection.wait(limit)
                if message is None:
                    break
                if self.checked(message).kind in ("abort", "status", "refused"):
                    text = message["text"]
        if not text:
            text = f"sender rank 0 ({self.lead}) does not answer"
            text += f": {self.lead.activity()}" if self.lead is not None else ""
        return marked(CollectiveTimeout(f"{text}; {self._outcome(version)}"))

    def _lead_lost(self, end: Exception, version: int) -> str:
        words = str(end) if isinstance(end, SenderLeft) else self.lead.end() if self.lead else str(end)
        who = f"sender rank 0 ({self.lead})"
        return f"{who}: {words or 'it has closed'}; {self._outcome(version)}"

    def _outcome(self, version: int | None) -> str:
        """Words on the version given up (None, -1: it had no number) and the one that stays."""
        unnumbered = version is None or version < 0
        return self.kept() if unnumbered else f"version {version} was given up, {self.kept()}"

    def _fit(self, message: Message, number: int, seconds: float) -> None:
        self.leave_group()
        lineup = Lineup(message)
        try:
            group = self._grouped(lineup, message["port"], seconds)
            movement = Movement(lineup, group) if lineup.here else Relay(lineup, group)
            if not movement.shared:
                movement = Relay(lineup, group)
        except GroupFailed as error:
            self.send("failed", number=number, lineup=lineup.number, error="", text=f"could not meet: {error}")
            return
        self.lineup, self.movement = lineup, movement
        self.fitted(movement)
        self.send("fitted", number=number, lineup=lineup.number)

    def _grouped(self, lineup: Lineup, port: int, seconds: float) -> Any:
        limit = timedelta(seconds=max(seconds, _ANSWER))
        try:
            if lineup.here:
                self._group = group_here(lineup, seconds)
                return self._group
            if self._store is None:
                self._store = self._store_at(port, limit)
            self._store.set_timeout(limit)  # else a store of a process that has died is waited for for minutes
            self._group = self._while_listening(lambda: group_apart(lineup, self._store, seconds), watched=False)
        except (OSError, RuntimeError) as error:
            raise GroupFailed(f"{type(error).__name__}: {error}") from error
        return self._group

    def _store_at(self, port: int, limit: timedelta) -> Any:
        """The store over which ranks of several hosts meet, which the sender's rank 0 serves."""
        assert self.connection is not None
        return TCPStore(self.connection.host, port, is_master=False, timeout=limit, wait_for_workers=False)

    def _move(self, message: Message, announced: Message, deadline: float) -> GroupFailed | None:
        number, lineup = announced["number"], message["lineup"]
        limit = min(deadline, time.monotonic() + message["left"])
        assert self.lineup is not None
        assert self.movement is not None
        exposed = {} if message["tables"] else self.movement.exposed(message["bases"])
        terms = Terms(message["tables"], announced["checksum"], limit, exposed)
        if not self.lineup.here:
            self._group._set_default_timeout(timedelta(seconds=left(limit) + _LATER))
        try:
            run = self._while_listening(lambda: self.move(terms, announced, message["bases"]), self.lineup.here)
            stats, sums = run
        except GroupFailed as error:
            self.leave_group()
            self.send("failed", number=number, lineup=lineup, error="", text=f"could not go on: {error}")
            return error
        self.send("moved", sums, number=number, lineup=lineup, stats=stats)
        return None

    def _while_listening(self, run: Callable[[], T], watched: bool) -> T:
        """Runs what may block. Unless the group is watched, and so ends by itself, a message of the lead ends it."""
        if watched:
            return run()
        results: list[Any] = []
        done, doing = os.pipe()

        def task() -> None:
            try:
                results.append((True, run()))
            except BaseException as error:
                results.append((False, error))
            os.close(doing)

        thread = OwnThread(target=task, name="unisono weights movement", daemon=True)
        thread.start()
        try:
            assert self.connection is not None
            while not results:
                message = self.connection.wait(time.monotonic() + 3600, done)
                if message is not None:
                    self.connection.unread(message)
                    self._break_off(thread)
                    break
        finally:
            os.close(done)
        if not results:
            raise GroupFailed("the update was given up meanwhile")
        worked, result = results[0]
        if worked:
            return cast(T, result)
        raise result

    def _break_off(self, thread: OwnThread) -> None:
        """Leaves a thread that waits in a group of Gloo to the group's timeout: nothing else ends such a wait."""
        movement = self.movement
        if isinstance(movement, Relay):
            limit = time.monotonic() + _BUSY
            while thread.is_alive() and time.monotonic() < limit and not movement.break_off():
                thread.join(0.001)

    def report_failure(self, number: int, error: BaseException) -> None:
        """What this rank raises, for all others."""
        kinds = (MismatchError, CorruptionError)
        kind = next((each.__name__ for each in kinds if isinstance(error, each)), "UpdateError")
        plain = isinstance(error, MismatchError)
        text = getattr(error, "for_others", None) or f"raised {kind_and_text(error)}{self.doing()}"
        with suppress(Broken):
            self.send("failed", number=number, lineup=0, error=kind, text=str(error) if plain else text, plain=plain)

    def leave_group(self) -> None:
        """Ends the group of the line-up; what waits in it, here or at a peer, goes on with an error."""
        group, movement = self._group, self.movement
        self._group = self.lineup = self.movement = None
        if movement is not None:
            movement.close()
        if group is not None:
            with suppress(RuntimeError):
                group.shutdown()

    def disconnect(self) -> None:
        """Ends the connection, and what depends on it."""
        self.leave_group()
        connection, self.connection, self._store = self.connection, None, None
        self._sent = ""
        if connection is not None:
            connection.close()


def marked(error: E) -> E:
    """The error, as one of which the lead knows."""
    error.from_lead = True  # type: ignore[attr-defined]
    return error


class Again(Exception):
    """The update was called off, for nobody is there any more to take part."""

    from_lead = True


def given_up(message: Message, version: int, kept: Callable[[], str]) -> Exception:
    """The error of an update that the lead gave up."""
    if not message["error"]:
        return Again()
    kind = getattr(errors, message["error"], UpdateError)
    given = f"version {version} was given up, " if version >= 0 else ""  # the sender's ranks agreed on none
    return marked(kind(f"{message['text']}; {given}{kept()}"))
