"""The sides of a meeting as the sender's rank 0 sees them: its own side, and the replicas that have joined."""

import time
from dataclasses import dataclass, field
from typing import Any

from unisono.transport.memory_store import MemoryStore
from unisono.units import name_ranks
from unisono.weights.wire import PROTOCOL, Connection, Message, Who

__all__ = ["Attempt", "Member", "Party", "described", "outcome", "pushes_at_odds", "read_hello"]

_READING = 1.0  # s: how long a connection may take to end after its process


@dataclass(eq=False)
class Member:
    """One rank of a side, at the other end of a connection."""

    connection: Connection
    party: "Party"
    rank: int
    who: Who
    reached: str = ""
    """What it has reported last in the update under way: ready, fitted, moved, shown."""
    held: bool = False
    """A decided version was not shown in time, and waits for those who hold."""
    begun: int = 0
    waits: int = 0
    """Holds that it had begun when an update was decided, and the number of that while it waits for those of others."""
    signature: str = ""
    text: str = ""
    """A digest of what it holds, and that as it describes it."""
    bases: list[Any] = field(default_factory=list)
    """The version it shows, and of which sender."""
    waiting: list[Any] | None = None
    """The bases of a replica's rank that waits in a pull, and so is ready for what is announced next."""
    stats: dict[str, Any] = field(default_factory=dict)
    sums: bytes = b""

    def describe(self, ready: Message) -> None:
        """Keeps what a report says of what it holds: the description is sent with it only when it has changed."""
        self.signature = str(ready["signature"])
        self.text = ready.data.decode() or self.text

    def __str__(self) -> str:
        return f"{self.party} rank {self.rank} ({self.who})"


@dataclass(eq=False)
class Party:
    """The ranks of one side. ``instance`` names its object: a replica that is started again has another."""

    sender: bool
    name: str
    instance: str
    world_size: int
    rules: Any
    mapped: bool
    members: dict[int, Member] = field(default_factory=dict)
    shows: int | None = None
    lost: str = ""
    """How a rank of it was lost; it can take part no more."""
    odds: str = ""
    """What its ranks were given differently."""

    def __str__(self) -> str:
        return "sender" if self.sender else f"replica {self.name!r}"

    @property
    def complete(self) -> bool:
        """True if all its ranks are there."""
        return len(self.members) == self.world_size and not self.lost

    @property
    def ranks(self) -> list[Member]:
        """Its members by rank."""
        return [self.members[rank] for rank in sorted(self.members)]

    @property
    def together(self) -> bool:
        """True if its ranks show a version between the same holds: they hold parts, and threads may hold these."""
        return len(self.members) > 1 and any(member.stats.get("holds") for member in self.ranks)

    def compare(self, given: dict[str, Any]) -> None:
        """Notes in ``odds`` what a rank that joins was given otherwise than the first."""
        for what in ("rules", "mapped"):
            own = getattr(self, what)
            if given[what] != own:
                found = {next(iter(self.members), 0): own, given["rank"]: given[what]}
                self.odds = _odds(f"the ranks of {self} were made with different {what}", found, "make them alike")

    def absence(self) -> str:
        """Words on ranks that are not there."""
        absent = [rank for rank in range(self.world_size) if rank not in self.members]
        return self.lost or (f"{self} {name_ranks(absent)} has not come" if absent else "")


@dataclass(eq=False)
class Attempt:
    """One update under way. ``awaited``: what every member is to report next; ``lineup`` numbers the groups made."""

    number: int
    version: int
    deadline: float
    drop: bool
    parties: list[Party]
    awaited: str = "ready"
    lineup: int = 0
    store: MemoryStore | None = None
    """Over which the group of the line-up is made."""
    lost: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The replicas for which it was decided."""
    stats: list[dict[str, int]] = field(default_factory=list)
    """What each of their ranks has taken."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Errors after the decision: kind and text."""
    odds: str = ""
    """What the ranks of a side were given differently: it is given up once all are there to read that."""
    suspicion: tuple[float, str] | None = None
    """A failure of the group, whose cause may be known by then."""
    began: float = field(default_factory=time.monotonic)

    @property
    def members(self) -> list[Member]:
        """All ranks, senders first, then replica by replica."""
        return [member for party in self.parties for member in party.ranks]

    @property
    def outwards(self) -> list[Member]:
        """The same, rank 0 of the sender last: once it reads a message it keeps the interpreter from sending others."""
        return self.members[::-1]

    @property
    def replicas(self) -> list[Party]:
        """The receiving sides."""
        return [party for party in self.parties if not party.sender]

    def missing(self, besides: Member | None = None) -> list[Member]:
        """The members that have not reported what is awaited."""
        return [m for m in self.members if m.reached != self.awaited and m is not besides]

    @property
    def key(self) -> list[tuple[str, int, str]]:
        """Equal for two updates that the same processes can do by the same plan."""
        return [(member.party.instance, member.rank, member.signature) for member in self.members]


def described(parties: list[Party], rules: str) -> list[dict[str, Any]]:
    """The sides as a fit message has them. rules: the sender's."""
    return [
        {
            "name": party.name,
            "rules": rules if party.sender else party.rules,
            "mapped": party.mapped,
            "layouts": [member.signature for member in party.ranks],
            "who": [member.who for member in party.ranks],
        }
        for party in parties
    ]


def outcome(attempt: Attempt) -> dict[str, Any]:
    """What the sender's ranks read at the end of an update that was decided."""
    error, text = attempt.problems[0] if attempt.problems else ("", "")
    return {
        "number": attempt.number,
        "version": attempt.version,
        "error": error,
        "text": text,
        "receivers": [name for name in attempt.names if name not in attempt.lost],
        "lost": attempt.lost,
        "seconds": time.monotonic() - attempt.began,
        "nbytes": sum(each.get("nbytes", 0) for each in attempt.stats),
        "moved": sum(each.get("moved", 0) for each in attempt.stats),
        "tensors": max((each.get("tensors", 0) for each in attempt.stats), default=0),
        "skipped": max((each.get("skipped", 0) for each in attempt.stats), default=0),
    }


_ALIKE = ("rules", "delta", "bucket", "checksum", "lost", "backend")  # of a sender, the same on all its ranks


def pushes_at_odds(pushes: dict[int, dict[str, Any]]) -> str:
    """Words on what a sender's ranks passed differently, by rank; empty if they agree."""
    for what in ("version", *_ALIKE):
        given = {rank: fields[what] for rank, fields in sorted(pushes.items())}
        if len(set(given.values())) > 1:
            if what == "version":
                return _odds("the ranks of the sender passed different versions to push", given, "pass one")
            return _odds(f"the ranks of the sender were made with different {what}", given, "make them alike")
    return ""


def _odds(words: str, given: dict[int, Any], remedy: str) -> str:
    each = ", ".join(f"rank {rank} passed {str(value).strip()}" for rank, value in sorted(given.items()))
    return f"{words}: {each}; {remedy}"


def read_hello(message: Message, knows: Any) -> tuple[dict[str, Any], str]:
    """The checked fields of the first message of a connection, and words that refuse it, if so. Raises `ValueError`."""
    if message.kind != "hello":
        raise ValueError(message.kind)
    given = message.fields
    if given.get("protocol") != PROTOCOL:
        return {}, "runs another version of unisono than the sender: give all ranks one installation"
    try:
        found = {
            "sender": bool(given["sender"]),
            "name": str(given["name"])[:200],
            "instance": str(given["instance"])[:64],
            "rank": int(given["rank"]),
            "world_size": int(given["world_size"]),
            "who": Who.of(given["who"]),
            "rules": given["rules"],
            "mapped": bool(given["mapped"]),
            "bases": list(given["bases"]),
        }
        word = str(given["word"])
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not 0 <= found["rank"] < found["world_size"] <= 1 << 16:
        raise ValueError("rank")
    if not knows(word):
        return {}, "does not know the word of the meeting: the file or store has been replaced meanwhile"
    return found, ""
