"""One update after the other, as the sender's rank 0 leads them: who must come, what is awaited, what becomes of it.

    push → announce → ready → fit → fitted → go → moved → decide → shown → done

A sender's rank is ready with its push, and shows nothing; a replica's is ready ahead if its thread waits in a pull.
`Attempt.awaited` is what every member reports next. Until `decide` any failure gives the update up everywhere, and each
rank reads why; after it the version stands, whatever happens.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.transport.memory_store import MemoryStore
from unisono.weights.lateness import doing, nobody_pushes, status
from unisono.weights.parties import Attempt, Member, Party, described, outcome, pushes_at_odds
from unisono.weights.wire import Message

if TYPE_CHECKING:
    from unisono.weights.coordinator import Coordinator

__all__ = ["Lead"]

_CAUSE = 0.5  # s that the cause of a group's failure may take to be known


class Lead:
    """The state of the updates at one address; called by the coordinator's thread alone."""

    def __init__(self, hub: "Coordinator", receivers: int) -> None:
        self._hub = hub
        self._receivers = receivers
        self._pushes: dict[int, dict[str, Any]] = {}
        self._later: dict[int, list[dict[str, Any]]] = {}  # pushes of ranks whose push before failed there at once
        self._since = 0.0
        self._attempt: Attempt | None = None
        self._number = 0
        self._lineups = 0
        self._key: list[Any] | None = None
        self._gone: dict[str, str] = {}  # replicas lost since the last push, which has not been informed of them
        self._last = ""  # who was there last
        self.version: int | None = None
        """The version decided last."""

    # What happens

    def next_time(self) -> float | None:
        """When `on_time` is due."""
        attempt = self._attempt
        if attempt is None:
            return self._deadline() if self._pushes else None
        return min(attempt.deadline, attempt.suspicion[0]) if attempt.suspicion else attempt.deadline

    def on_time(self, now: float) -> None:
        """Gives up what has taken too long."""
        attempt = self._attempt
        if attempt is None:
            if self._pushes and now >= self._deadline():
                self._refuse("CollectiveTimeout", self._absent())
        elif now >= attempt.deadline:
            self._late(attempt)
        elif attempt.suspicion and now >= attempt.suspicion[0]:
            self._abort("UpdateError", attempt.suspicion[1])

    def joined(self, party: Party) -> None:
        """All ranks of a side are there."""
        if not party.sender:
            self._gone.pop(party.name, None)
            self._last = f"{party} ({party.ranks[0].who})"
        self._begin()

    def left(self, party: Party, words: str, clean: bool, replaced: bool = False) -> None:
        """A rank of a side has left (``clean``) or was lost; ``words`` on the rank and its end."""
        attempt = self._attempt
        if not party.sender:
            self._last = words
            if clean or replaced:
                self._gone.pop(party.name, None)
        if attempt is None or party not in attempt.parties:
            if not party.sender and not clean and not replaced:
                self._gone[party.name] = words
            if party.sender and self._pushes:
                self._refuse("PeerLostError", words)
            return
        if attempt.awaited == "shown":
            self._left_late(attempt, party, words, clean)
        elif party.sender or not (attempt.drop or (clean and attempt.awaited == "ready")):
            self._abort("PeerLostError", words)
        else:
            if not clean:
                attempt.lost.append(party.name)
            for member in party.ranks:
                self._give_up(member, attempt, "PeerLostError", words)
            self._without(attempt, party)

    def on_message(self, member: Member, message: Message) -> None:
        """Takes a report of a member."""
        at_any_time = {"push": self._push, "withdraw": self._withdraw, "waits": self._waits, "leaves": self._leaves}
        if message.get("signature"):
            member.describe(message)
        if message.kind in at_any_time:
            at_any_time[message.kind](member, message.fields)
            return
        attempt = self._attempt
        if message.kind == "shown" and not member.party.sender:
            member.party.shows, member.held = int(message["version"]), False
        if message.kind == "late" and (attempt is None or member not in attempt.members):
            self._hub.send(member, "status", text=self._status())
            return
        if attempt is None or message.get("number") != attempt.number or member not in attempt.members:
            return
        if message.kind == "failed":
            self._failed(attempt, member, message)
        elif message.kind == "late":
            self._late(attempt, member)
        elif message.get("lineup", attempt.lineup) == attempt.lineup and message.kind == attempt.awaited:
            member.reached = message.kind
            if message.kind == "ready":
                member.bases = message["bases"]
            elif message.kind == "moved":
                member.stats, member.sums = dict(message["stats"]), message.data
            if not attempt.missing():
                getattr(self, f"_all_{message.kind}")(attempt)

    # The way of an update

    def _push(self, member: Member, fields: dict[str, Any]) -> None:
        if self._pushes.get(member.rank, {}).get("error"):  # the other ranks have not come to that one yet
            self._later.setdefault(member.rank, []).append(fields)
            return
        if not self._pushes:
            self._since = time.monotonic()
        self._pushes[member.rank] = fields
        self._begin()

    def _waits(self, member: Member, fields: dict[str, Any]) -> None:
        """A replica's rank is in a pull, ready for what is announced next."""
        member.waiting = None if self._awaits(member) else fields["bases"]

    def _leaves(self, member: Member, fields: dict[str, Any]) -> None:
        """It has left the pull, at its timeout or by Ctrl-C."""
        attempt, member.waiting = self._attempt, None
        if attempt is not None and self._awaits(member) and member.reached:
            self._late(attempt, member)

    def _awaits(self, member: Member) -> bool:
        """True if the update under way needs something more of a member."""
        return self._attempt is not None and member in self._attempt.members and member.reached != "shown"

    def _withdraw(self, member: Member, fields: dict[str, Any]) -> None:
        """A rank has left its push, by Ctrl-C for one: nothing may come of that later."""
        attempt, pushed = self._attempt, self._pushes.get(member.rank)
        if pushed is None or pushed["call"] != fields["call"] or (attempt and attempt.awaited == "shown"):
            return
        if attempt is not None:
            self._abort("UpdateError", fields["text"], member)
        else:
            pushed["error"] = fields["text"]
            self._begin()

    def _deadline(self) -> float:
        return self._since + float(min(fields["timeout"] for fields in self._pushes.values()))

    def _begin(self) -> None:
        """Announces an update if all who must be there are."""
        own, pushes = self._hub.own, self._pushes
        if self._attempt is not None or not pushes:
            return
        if own.lost:
            self._refuse("PeerLostError", own.lost)
            return
        if len(pushes) < own.world_size or not own.complete:
            return
        if broken := [fields["error"] for fields in pushes.values() if fields.get("error")]:
            self._refuse("UpdateError", broken[0])
            return
        replicas = [party for party in self._hub.parties.values() if party.complete]
        needed = 0 if self.version is not None else min(self._receivers, 1 if self._number else self._receivers)
        version, odds = self._next_version(), pushes_at_odds(pushes)
        if not odds and self.version is not None and version <= self.version:
            words = f"version {version} was passed to push, but version {self.version} has been pushed: versions grow"
            self._refuse("UsageError", words, numbered=False)
            return
        if len(replicas) < needed:
            return
        first = pushes[0]
        if self._gone and first["lost"] != "drop":
            words = "; ".join(self._gone.values())
            self._gone.clear()
            self._refuse("PeerLostError", words)
            return
        self._number += 1
        odds = odds or next((party.odds for party in replicas if party.odds), "")
        version = version if len({fields["version"] for fields in pushes.values()}) == 1 else -1
        lost, self._gone = list(self._gone), {}
        drop = first["lost"] == "drop"
        attempt = Attempt(self._number, version, self._deadline(), drop, [own, *replicas], lost=lost, odds=odds)
        self._attempt = attempt
        for member in attempt.outwards:
            self._announce(member, attempt)
        if not attempt.missing():
            self._all_ready(attempt)

    def _announce(self, member: Member, attempt: Attempt) -> None:
        """To those that are ready, the sender's ranks and who waits in a pull, with the message that follows."""
        first = self._pushes[0]
        about = {key: first[key] for key in ("checksum", "delta")}
        about |= {"number": attempt.number, "version": attempt.version}
        about["call"] = self._pushes[member.rank]["call"] if member.party.sender else 0
        ready = member.party.sender or member.waiting is not None
        if ready:
            member.bases, member.waiting, member.reached = member.waiting or [], None, "ready"
            member.connection.hold_back("announce", ready=True, **about)
        else:
            member.reached = ""
            self._hub.send(member, "announce", ready=False, **about)

    def _all_ready(self, attempt: Attempt) -> None:
        if attempt.odds:
            self._abort("MismatchError", attempt.odds)
        elif attempt.key == self._key:
            self._go(attempt)
        else:
            self._fit(attempt)

    def _fit(self, attempt: Attempt) -> None:
        self._key = None
        if not attempt.replicas:
            self._all_moved(attempt)  # it goes to nobody
            return
        self._lineups += 1
        attempt.lineup, attempt.awaited = self._lineups, "fitted"
        attempt.store = MemoryStore.create()
        parties = described(attempt.parties, self._pushes[0]["rules"])
        texts = {member.signature: member.text for member in attempt.members}
        first = self._pushes[0]
        settings = {key: first[key] for key in ("bucket", "backend", "port")}
        for number, member in enumerate(attempt.outwards, 1):
            self._hub.send(
                member,
                "fit",
                number=attempt.number,
                lineup=attempt.lineup,
                rank=len(attempt.members) - number,
                parties=parties,
                texts=texts,
                store=attempt.store.address,
                **settings,
            )

    def _all_fitted(self, attempt: Attempt) -> None:
        self._key = attempt.key
        self._go(attempt)

    def _go(self, attempt: Attempt) -> None:
        attempt.awaited = "moved"
        tables = any(fields["tables"] for fields in self._pushes.values())
        bases = [member.bases for member in attempt.members]
        for member in attempt.outwards:
            self._hub.send(
                member, "go", number=attempt.number, lineup=attempt.lineup, tables=tables, bases=bases,
                left=attempt.deadline - time.monotonic(),
            )  # fmt: skip

    def _all_moved(self, attempt: Attempt) -> None:
        """Decides. Nothing is shown at the sender's ranks."""
        attempt.awaited, self.version = "shown", attempt.version
        for member in self._hub.own.ranks:
            member.reached = "shown"
        attempt.stats = [member.stats for party in attempt.replicas for member in party.ranks]
        attempt.names = [party.name for party in attempt.replicas]
        sums = [[member.sums for member in party.ranks] for party in attempt.parties]
        for party, parts in reversed([*zip(attempt.parties, sums, strict=True)]):
            others = sums[1:] if party.sender else [parts]
            lengths = [[len(part) for part in each] for each in others]
            data = b"".join(part for each in others for part in each) if party.sender or len(parts) > 1 else b""
            for member in reversed(party.ranks):
                about = {"lengths": lengths, "together": party.together}
                self._hub.send(member, "decide", data, number=attempt.number, **about)
        if not attempt.missing():
            self._all_shown(attempt)

    def _all_shown(self, attempt: Attempt) -> None:
        """Reports the end of an update that was decided to the sender's ranks."""
        self._attempt, self._pushes = None, {}
        for member in self._hub.own.ranks:
            self._hub.send(member, "done", shows=self._hub.shown(), **outcome(attempt))

    # What goes wrong

    def _failed(self, attempt: Attempt, member: Member, message: Message) -> None:
        error = str(message["error"])
        text = str(message["text"]) if message.get("plain") else f"{member} {message['text']}"
        if attempt.awaited == "shown":
            words = f"version {attempt.version} stands, but {text}; it shows none until the next whole one"
            attempt.problems.append((error or "UpdateError", words))
            member.party.shows = None
            member.reached = "shown"
            if not attempt.missing():
                self._all_shown(attempt)
        elif error:
            self._abort(error, text, member)
        elif message["lineup"] == attempt.lineup and attempt.suspicion is None:
            attempt.suspicion = time.monotonic() + _CAUSE, text

    def _abort(self, error: str, text: str, origin: Member | None = None, besides: Sequence[Member] = ()) -> None:
        """Gives the update up on all ranks but ``origin``, which knows; ``besides`` raise `CollectiveTimeout`."""
        attempt = self._attempt
        assert attempt is not None
        self._attempt, self._pushes = None, {}
        if attempt.awaited != "ready":
            self._key = None
        for member in attempt.outwards:  # the sender's next push, or a pull after this one, finds no old announcement
            if member is not origin:
                kind = "CollectiveTimeout" if member in besides else error
                self._give_up(member, attempt, kind, text)

    def _give_up(self, member: Member, attempt: Attempt, error: str, text: str) -> None:
        self._hub.send(member, "abort", number=attempt.number, error=error, text=text)

    def _next_version(self) -> int:
        """The version that the ranks push."""
        given = next(iter(self._pushes.values()))["version"]
        return int(given) if given is not None else (self.version or 0) + 1

    def _refuse(self, error: str, text: str, numbered: bool = True) -> None:
        """Ends a push of which nothing has been announced; ``numbered``: as one of a version that is given up."""
        version = self._next_version() if numbered else -1
        pushes, self._pushes = self._pushes, {}
        later, self._later = self._later, {}
        members = self._hub.own.members
        for rank, fields in pushes.items():
            if rank in members and not fields.get("error"):
                self._hub.send(members[rank], "refused", error=error, text=text, version=version, call=fields["call"])
        for rank, waiting in later.items():
            for fields in waiting if rank in members else []:
                self._push(members[rank], fields)

    def _late(self, attempt: Attempt, member: Member | None = None) -> None:
        """The time of the push, or of ``member``'s pull, is over."""
        missing = attempt.missing(besides=member)
        words = "; ".join(f"{each} {doing(attempt, each)}" for each in missing) or "nobody else is late"
        if attempt.awaited == "shown":
            if member is None:
                for each in missing:
                    each.held = True
                attempt.problems.append(("CollectiveTimeout", f"version {attempt.version} stands, but {words}"))
                self._all_shown(attempt)
            return
        waited = time.monotonic() - attempt.began
        text = f"after {waited:.3g} s the update still waits: {words}"
        self._abort("UpdateError", text, besides=self._hub.own.ranks if member is None else [member])

    def _status(self) -> str:
        """Words for a replica that has waited in vain."""
        waiting = self._pushes and self._attempt is None
        return status(self._hub, self._absent() if waiting else "", self.version)

    def _absent(self) -> str:
        """Words on who has not come to a push."""
        return nobody_pushes(self._hub, self._pushes, self._receivers, time.monotonic() - self._since, self._last)

    def _left_late(self, attempt: Attempt, party: Party, words: str, clean: bool) -> None:
        """A side left after the decision."""
        if party.sender:
            attempt.problems.append(("PeerLostError", words))
        elif party.shows == attempt.version:
            pass  # it has what it was to have
        elif attempt.drop:
            attempt.lost.append(party.name)
        elif not clean:
            attempt.problems.append(("PeerLostError", f"version {attempt.version} stands, but {words}"))
        if not party.sender:
            attempt.parties.remove(party)
        if not attempt.missing():
            self._all_shown(attempt)

    def _without(self, attempt: Attempt, party: Party) -> None:
        """Goes on without a replica."""
        attempt.parties.remove(party)
        if not attempt.replicas and attempt.awaited == "ready" and not attempt.drop:
            self._attempt = None
            for member in attempt.members:
                self._give_up(member, attempt, "", "")
            self._begin()
        elif attempt.awaited == "ready":
            if not attempt.missing():
                self._all_ready(attempt)
        else:
            for member in attempt.members:
                member.reached = "ready"
            attempt.suspicion = None
            self._fit(attempt)

    def end(self, words: str) -> None:
        """The sender closes: nothing is under way any more."""
        if self._attempt is not None:
            self._abort("UpdateError", words)
        elif self._pushes:
            self._refuse("UsageError", words, numbered=False)
