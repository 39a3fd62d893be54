"""A receiver's way to the sender of an address: found, connected, joined, and again after either has gone."""

import os
import time
from contextlib import suppress
from typing import Any

from unisono.errors import CollectiveTimeout, UsageError
from unisono.weights.meeting import Note, connect, pause, place_at
from unisono.weights.participant import Participant
from unisono.weights.wire import PROTOCOL, Broken, Connection, Message, Who

__all__ = ["Joining"]

_PAUSE = 0.01  # s between two looks at an address
_WELCOME = 2.0  # s that a sender may take to answer


class Joining:
    """The address, and what this rank says of itself there (``about``)."""

    def __init__(self, address: Any, part: Participant, **about: Any) -> None:
        """Raises `UsageError` for an address of an unknown form."""
        self._place = place_at(address)
        self._part, self._about = part, about
        self.address = self._place.address
        self.waker, self._waking = os.pipe()
        self._closed = False
        self._last: Note | None = None
        self._silent: Who | None = None  # a sender that listens but does not answer
        self._mute = False  # so does who knows what

    def try_once(self) -> None:
        """Joins if a sender is there. Raises `UsageError` if that refuses, or the address holds something else."""
        self._connect(time.monotonic() + _WELCOME)

    def join(self, deadline: float) -> None:
        """Returns once this rank has joined. Raises `CollectiveTimeout` if nobody is there until ``deadline``."""
        part = self._part
        if part.connection is not None and self._alive():
            return
        while not self._connect(deadline):
            self.check_open()
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(f"{self._absent()}; {part.kept()}")
            pause(min(_PAUSE, max(deadline - time.monotonic(), 0.0)), self.waker)

    def _alive(self) -> bool:
        """False, and nothing is left of the connection, if the sender has gone since the last update."""
        part = self._part
        assert part.connection is not None
        try:
            message = part.connection.receive()
            if message is not None and message.kind != "bye":
                part.connection.unread(message)
            if message is None or message.kind != "bye":
                return True
        except Broken:
            pass
        part.disconnect()
        return False

    def _connect(self, deadline: float) -> bool:
        note = self._place.find()
        if note is not None and note.who is not None:
            self._last = note
        if note is None or note.closed or (note.who is not None and note.who.gone):
            return False
        sock = connect(note)
        if sock is None:
            return False
        connection = Connection(sock)
        try:
            connection.send(
                "hello", protocol=PROTOCOL, sender=False, who=Who.mine(), word=note.word, bases=[], **self._about
            )
            return self._welcomed(connection, note, min(deadline, time.monotonic() + _WELCOME))
        except UsageError:
            raise
        except (Broken, KeyError, TypeError, ValueError) as error:
            connection.close()
            if "not a message" in str(error) or not isinstance(error, Broken):
                raise UsageError(f"something else than a sender listens at {self.address}: check the port") from None
            return False

    def _welcomed(self, connection: Connection, note: Note, limit: float) -> bool:
        """Takes the sender's answers until this replica has joined."""
        part = self._part
        while True:
            message: Message | None = connection.wait(limit, self.waker)
            if message is None:
                self._silent, self._mute = note.who, True
                connection.send("bye", words="has waited in vain")  # a sender that is slow must not take it for lost
                connection.close()
                return False
            if message.kind == "refused":
                connection.close()
                if "word of the meeting" in message["text"]:
                    return False
                raise UsageError(f"this replica {message['text']}")
            if message.kind == "welcome":
                lead, instance = Who.of(message["who"]), str(message["instance"])
                part.connection, part.lead, part.instance = connection, lead, instance
                self._last = note._replace(who=lead)
                if self._about["world_size"] > 1:
                    return True
            if message.kind == "joined" and part.connection is not None:
                return True

    def _absent(self) -> str:
        """Words on nobody being there."""
        last = self._last.who if self._last is not None else None
        words = f"no sender came to {self.address}"
        if self._silent is not None and not self._silent.gone:
            return f"the sender at {self.address} ({self._silent}) does not answer: {self._silent.activity()}"
        if last is None and self._mute:
            return f"what listens at {self.address} does not answer as a sender does: check the address"
        if last is None:
            return f"{words}: start one with this address"
        closed = " (it has closed)" if self._last is not None and self._last.closed else ""
        state = closed or (f" ({last.activity()})" if last.visible else "")
        return f"{words}: the sender of {last} was there last{state}"

    def check_open(self) -> None:
        """Raises `UsageError` if the receiver was closed meanwhile."""
        if self._closed:
            raise UsageError(f"this receiver at {self.address} was closed")

    def interrupt(self) -> None:
        """Ends waits, for the receiver is closed."""
        if not self._closed:
            self._closed = True
            os.write(self._waking, b"c")

    def leave(self) -> None:
        """Says goodbye."""
        self.interrupt()
        if self._part.connection is not None:
            with suppress(Broken):
                self._part.connection.send("bye", words="has closed")
        self._part.disconnect()
        for descriptor in (self.waker, self._waking):
            with suppress(OSError):
                os.close(descriptor)
