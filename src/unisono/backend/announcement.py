"""What a process announces of itself as a rank of a group, in the job's store (member_registry.py reads it)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from unisono.runtime.monitor import Loss
from unisono.transport.host import Host
from unisono.transport.process import Identity, alive
from unisono.watch.exit_notes import read_exit_note

__all__ = ["Announcement", "fresh"]

_seen: set[Identity] = set()  # processes that have lived beside this one


class Announcement(NamedTuple):
    """A process's announcement as a rank, made at ``moment`` (`ticks`); ``reason``: an exit note, if it does not join.

    ``place``: its `Host` as text, nothing if that is not known.
    """

    pid: int
    started: int
    place: str
    hostname: str
    reason: str
    moment: int

    def loss(self, who: str) -> Loss:
        """Of the rank ``who``, if it does not join; else empty."""
        words, cause, _ = read_exit_note(self.reason)
        return Loss(f"{who} {words}", cause) if self.reason else Loss("")

    @property
    def who(self) -> Identity:
        """The process."""
        return Identity(self.pid, self.started)

    @property
    def host(self) -> Host:
        """Its host, this one if that is not known."""
        return Host.from_text(self.place) if self.place else Host.mine()

    def here(self) -> bool:
        """True if on this host, if that is known."""
        return self.host == Host.mine()


def fresh(found: Sequence[Any]) -> Announcement | None:
    """The announcement as it was read; None if it is left over from an earlier attempt."""
    note, mine = Announcement(*found), Host.mine()
    if mine.boot != note.host.boot:
        return note
    seen = mine.sees(note.host) and (alive(note.who) or note.who in _seen)
    if seen:
        _seen.add(note.who)
    return note if seen or note.moment >= Identity.mine().started else None
