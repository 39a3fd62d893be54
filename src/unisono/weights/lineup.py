"""A line-up: the ranks of one update, numbered senders first, their plan, and the group in which its data travels.

All ranks compute the same plan from the same texts. A line-up serves every update of the same ranks and layouts until
one fails.
"""

import time
from functools import lru_cache
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from unisono.backend.private import private_group
from unisono.errors import MismatchError, UsageError
from unisono.transport.memory_store import MemoryStore
from unisono.weights.apart import check_backend, make_group
from unisono.weights.fit import Fit, fit
from unisono.weights.layout import Layout, merge
from unisono.weights.plan import make_plan
from unisono.weights.rules import rules_from_text
from unisono.weights.wire import Message, Who

__all__ = ["Lineup", "group_apart", "group_here", "left"]


@lru_cache(maxsize=16)
def _layout(texts: tuple[str, ...]) -> Layout:
    """The layout of a side from what each of its ranks describes."""
    return merge([Layout.from_text(text) for text in texts])


def _layouts(parties: list[dict[str, Any]], texts: dict[str, str]) -> list[Layout]:
    """The layout of every side. Raises `MismatchError` with all sides whose ranks are at odds."""
    found, wrong = [], []
    for number, party in enumerate(parties):
        try:
            found.append(_layout(tuple(texts[key] for key in party["layouts"])))
        except MismatchError as problem:
            who = f"replica {party['name']!r}" if number else "sender"
            wrong.append(f"{who}: {problem}")
    if wrong:
        raise MismatchError("\n".join(wrong))
    return found


def _fits(parties: list[dict[str, Any]], layouts: list[Layout]) -> list[Fit]:
    """How each replica's tensors are made. Raises `MismatchError` with all replicas to which what is sent is no fit."""
    found: dict[Any, Fit] = {}
    wrong: dict[Any, str] = {}
    keys = [(id(layout), party["rules"]) for party, layout in zip(parties[1:], layouts[1:], strict=True)]
    for key, party, layout in zip(keys, parties[1:], layouts[1:], strict=True):
        if key in found:
            continue
        name = f"replica {party['name']!r}"
        try:
            rules = rules_from_text(parties[0]["rules"]) + rules_from_text(party["rules"])
            found[key] = fit(layouts[0], layout, rules, name)
        except MismatchError as problem:
            wrong.setdefault(key, str(problem))
        except UsageError as problem:
            raise UsageError(f"for {name}: {problem}") from None
    if wrong:
        raise MismatchError("\n".join(wrong.values()))
    return [found[key] for key in keys]


class Lineup:
    """What a fit message says, and what follows from it. Raises `MismatchError` and `UsageError` as `fit` does."""

    def __init__(self, message: Message) -> None:
        self.number: int = message["lineup"]
        self.rank: int = message["rank"]
        self.parties: list[dict[str, Any]] = message["parties"]
        self.names = [party["name"] for party in self.parties[1:]]
        self.who = [Who.of(who) for party in self.parties for who in party["who"]]
        self.mapped = {number for number, party in enumerate(self.parties[1:]) if party["mapped"]}
        """The numbers of the replicas that are mapped."""
        self.here = one_host(self.who)
        self.store: str = message["store"]
        self.bucket: int = message["bucket"]
        self.backend: str = message["backend"] if self.here else check_backend(message["backend"])
        layouts = _layouts(self.parties, message["texts"])
        fits = _fits(self.parties, layouts)
        forward = "direct" if self.here else "auto"
        self.plan = make_plan(layouts[0], layouts[1:], fits, self.bucket, forward)
        self.senders = layouts[0].world_size
        bounds = [self.senders]
        for layout in layouts[1:]:
            bounds.append(bounds[-1] + layout.world_size)
        self._first = bounds
        self.replica = next((i for i in range(len(fits)) if bounds[i] <= self.rank < bounds[i + 1]), -1)
        """The number of the replica that this rank belongs to, -1 at the sender."""

    @property
    def sends(self) -> bool:
        """True at a rank of the sender."""
        return self.replica < 0

    @property
    def own(self) -> int:
        """This rank's number on its side."""
        return self.rank if self.sends else self.rank - self._first[self.replica]

    def replica_of(self, target: int) -> int:
        """The number of the replica that a rank belongs to."""
        return max(i for i, first in enumerate(self._first) if first <= target)

    def ranks_of(self, replica: int) -> range:
        """The numbers in the line-up of a replica's ranks."""
        return range(self._first[replica], self._first[replica + 1])

    def kind_of(self, replica: int) -> int:
        """The first mapped replica that gets the same tensors."""
        fits = self.plan.fits
        return next(number for number in sorted(self.mapped) if fits[number] is fits[replica])

    def layout_of(self, target: int) -> Layout:
        """The layout of the replica that a rank belongs to."""
        return self.plan.receivers[self.replica_of(target)]

    def firsts(self, targets: tuple[int, ...]) -> set[int]:
        """Of the targets of a chunk the first of each replica, which counts its checksums."""
        found: dict[int, int] = {}
        for target in targets:
            found.setdefault(self.replica_of(target), target)
        return set(found.values())


def one_host(ranks: list[Who]) -> bool:
    """True if these processes can share memory."""
    return len({who.host for who in ranks}) == 1


def group_here(lineup: Lineup, seconds: float) -> Any:
    """The group of a line-up on one host, of unisono. Raises `PeerLostError` if the lead has left."""
    store, processes = MemoryStore.open(lineup.store, seconds), [who.identity for who in lineup.who]
    return private_group(store, lineup.rank, processes, f"weights line-up {lineup.number}", seconds)


def group_apart(lineup: Lineup, store: Any, seconds: float) -> Any:
    """The group of a line-up over several hosts, of the sender's backend."""
    prefixed = PrefixStore(f"line-up {lineup.number}", store)
    return make_group(lineup.backend, prefixed, lineup.rank, [who.identity for who in lineup.who], seconds)


def left(deadline: float) -> float:
    """Seconds until a deadline, at least a little."""
    return max(deadline - time.monotonic(), 0.001)
