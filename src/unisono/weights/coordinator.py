"""The sender's rank 0 serves the connections of all other ranks, and that of its own caller, in a thread of its own.

So replicas join, leave and die while the trainer computes. What an update needs is in lead.py.
"""

import os
import selectors
import socket
import time
from contextlib import suppress
from typing import Any

from unisono.transport.process import OwnThread
from unisono.weights.lead import Lead
from unisono.weights.meeting import Listener
from unisono.weights.parties import Member, Party, read_hello
from unisono.weights.together import let_show, take_report
from unisono.weights.wire import HELLO_NBYTES, Broken, Connection, Message, Who

__all__ = ["Coordinator"]

_SILENCE = 5.0  # s that a connection may take to name itself
_STRANGERS = 64
_CLOSING = 0.5  # s
_LONGEST = 3600.0  # s of one select, which takes no more than some days


class Coordinator:
    """Who has joined at one address. Its thread alone touches the connections."""

    def __init__(self, listener: Listener, instance: str, world_size: int, receivers: int) -> None:
        self._listener = listener
        self.own = Party(True, "", instance, world_size, None, False)
        self.lead = Lead(self, receivers)
        self.address = listener.address
        self.parties: dict[str, Party] = {}
        """Replicas by name."""
        self._strangers: dict[Connection, float] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, waking = os.pipe()
        self._waking = waking
        self._selector.register(listener.socket, selectors.EVENT_READ, None)
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._parting = self._closing = ""
        self._adopted: Connection
        self._thread = OwnThread(target=self._serve, name="unisono weights", daemon=True)
        self._thread.start()

    def own_connection(self) -> Connection:
        """The connection of rank 0's own caller."""
        mine, theirs = socket.socketpair()
        self._adopted = Connection(theirs)
        os.write(self._waking, b"a")
        return Connection(mine)

    def close(self, words: str) -> None:
        """Says goodbye to all and ends the thread."""
        if self._thread.is_alive():
            self._parting = words
            os.write(self._waking, b"c")  # before the thread knows: it closes what is written to
            self._thread.join(_CLOSING + 5)

    def shown(self) -> dict[str, int | None]:
        """The version that each replica shows, of those that have joined."""
        parties = dict(self.parties)
        return {name: party.shows for name, party in sorted(parties.items()) if party.complete}

    # The thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._once()
            self._part()
        finally:
            self._listener.close()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, Connection):
                    key.data.close()
            self._selector.close()
            os.close(self._waker)
            os.close(self._waking)

    def _once(self) -> None:
        limits = [begun + _SILENCE for begun in self._strangers.values()]
        limits += [time for time in (self.lead.next_time(),) if time is not None]
        wait = min(max(0.0, min(limits) - time.monotonic()), _LONGEST) if limits else None
        for key, events in self._selector.select(wait):
            if isinstance(key.data, Connection):
                self._talk(key.data, events)
            elif key.fd == self._waker:
                self._woken()
            else:
                self._accept()
        now = time.monotonic()
        for connection in [c for c, begun in self._strangers.items() if now - begun > _SILENCE]:
            self._drop(connection)
        self.lead.on_time(now)

    def _woken(self) -> None:
        for byte in os.read(self._waker, 64):
            if byte == ord("a"):
                self._watch(self._adopted)
            else:
                self._closing = self._parting

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.socket.accept()
                while len(self._strangers) >= _STRANGERS:
                    self._drop(next(iter(self._strangers)))
                self._watch(Connection(sock, HELLO_NBYTES))

    def _watch(self, connection: Connection) -> None:
        self._strangers[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _drop(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _talk(self, connection: Connection, events: int) -> None:
        member = self._member_of(connection)
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
                self._mask(connection)
            while events & selectors.EVENT_READ and (message := connection.receive()) is not None:
                if member is None:
                    member = self._greet(connection, message)
                    if member is None:
                        return
                elif message.kind == "bye":
                    self._left(member, str(message.get("words", "")), clean=True)
                    return
                else:
                    if message.kind in ("held", "shown", "failed"):
                        take_report(self.send, member, message)
                    self.lead.on_message(member, message)
        except (Broken, ValueError, KeyError, TypeError, AttributeError):
            if member is None:
                self._drop(connection)
            elif connection.fileno() >= 0:
                self._left(member, member.who.end(), clean=False)

    def _member_of(self, connection: Connection) -> Member | None:
        parties = [self.own, *self.parties.values()]
        return next((m for p in parties for m in p.members.values() if m.connection is connection), None)

    def send(self, member: Member, kind: str, data: bytes = b"", **fields: Any) -> None:
        """Sends a message, now or as soon as the system takes it; a broken connection is noticed when it is read."""
        with suppress(Broken):
            member.connection.send(kind, data, **fields)
            if member.connection.queued:
                self._mask(member.connection)

    def _mask(self, connection: Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.queued else 0)
        with suppress(KeyError, ValueError):
            self._selector.modify(connection, wanted, connection)

    # Who joins and leaves

    def _greet(self, connection: Connection, message: Message) -> Member | None:
        given, refusal = read_hello(message, self._listener.knows)
        if not refusal:
            party, refusal = self._party(given)
        if refusal:
            with suppress(Broken):
                connection.send("refused", text=refusal)
            self._drop(connection)
            return None
        self._strangers.pop(connection, None)
        connection.trust()
        member = Member(connection, party, given["rank"], given["who"], bases=given["bases"])
        party.members[member.rank] = member
        self.send(member, "welcome", who=Who.mine(), instance=self.own.instance)
        if party.complete:
            for other in party.ranks:
                self.send(other, "joined")
            self.lead.joined(party)
        return member

    def _party(self, given: dict[str, Any]) -> tuple[Party, str]:
        """The side that a rank belongs to, or words that refuse it."""
        if given["sender"]:
            mine = given["instance"] == self.own.instance and given["rank"] < self.own.world_size
            return self.own, "" if mine else "belongs to another sender"
        party = self.parties.get(given["name"])
        if party is not None and party.instance != given["instance"]:
            living = [member for member in party.ranks if not member.who.gone]
            if living and not party.lost:
                return party, f"may not be named {given['name']!r}: {living[0]} is; give it another name="
            for member in party.ranks:
                self._drop(member.connection)
            self.lead.left(party, party.lost or f"{party} was replaced", clean=False, replaced=True)
            party = None
        if party is None:
            party = Party(False, given["name"], given["instance"], given["world_size"], given["rules"], given["mapped"])
            self.parties[given["name"]] = party
        party.compare(given)
        if given["rank"] in party.members:
            self._drop(party.members.pop(given["rank"]).connection)
        return party, ""

    def _left(self, member: Member, words: str, clean: bool) -> None:
        party = member.party
        self._drop(member.connection)
        if party.members.get(member.rank) is member:
            del party.members[member.rank]
        let_show(self.send, party)
        if not clean and not party.lost:
            party.lost = f"{member}: {words}"
        ended = not party.sender and (not party.members or clean)
        if ended and self.parties.get(party.name) is party:
            del self.parties[party.name]
        self.lead.left(party, party.lost or f"{member} {words or 'has left'}", clean)

    def _part(self) -> None:
        """The last messages: the sender leaves, or what ended it."""
        self.lead.end(self._closing)
        members = [member for party in (self.own, *self.parties.values()) for member in party.ranks]
        for member in members:
            self.send(member, "bye", words=self._closing)
        limit = time.monotonic() + _CLOSING
        while any(m.connection.queued for m in members) and time.monotonic() < limit:
            for member in members:
                with suppress(Broken):
                    member.connection.flush()
            time.sleep(0.005)
