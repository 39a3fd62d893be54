"""Words on who has not come to an update, and what they do instead."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from unisono.units import show_count
from unisono.weights.parties import Attempt, Member, Party

if TYPE_CHECKING:
    from unisono.weights.coordinator import Coordinator

__all__ = ["doing", "nobody_pushes", "status"]


def doing(attempt: Attempt, member: Member) -> str:
    """What a member does instead of reporting."""
    activity = member.who.activity()
    if activity != "it runs":
        return f"has not come: {activity}"
    if attempt.awaited == "shown" or (attempt.awaited == "ready" and member.held):
        return "still holds the version before"
    if not member.reached:
        return "has not called pull"
    return f"has not finished ({member.reached or 'announced'}); {activity}"


def nobody_pushes(hub: "Coordinator", pushing: Collection[int], receivers: int, waited: float, last: str) -> str:
    """Who has not come to a push: ranks of the sender besides ``pushing``, or replicas; ``last``: who was there."""
    absent = [rank for rank in range(hub.own.world_size) if rank not in pushing]
    if absent:
        return f"after {waited:.3g} s {', '.join(_absence(hub.own, rank) for rank in absent)}"
    there = [str(party) for party in hub.parties.values() if party.complete]
    part = [party.absence() for party in hub.parties.values() if not party.complete]
    words = f"{show_count(len(there), 'replica')} of {max(receivers, 1)} joined in {waited:.3g} s"
    words += f" ({', '.join([*there, *part])})" if there or part else ""
    ended = f"; there last: {last}" if last and not there else ""
    return f"{words} at {hub.address}{ended}: start receivers with this address"


def status(hub: "Coordinator", absent: str, version: int | None) -> str:
    """What the sender does, for a replica that has waited in vain; ``absent``: whom its push waits for."""
    who = hub.own.ranks[0] if hub.own.ranks else hub.own
    if absent:
        return f"{who} waits in push ({absent})"
    pushed = f"its last version is {version}" if version is not None else "it has pushed nothing yet"
    return f"{who} is there but has not called push; {pushed}"


def _absence(own: Party, rank: int) -> str:
    member = own.members.get(rank)
    if member is None:
        return f"sender rank {rank} has not come"
    activity = member.who.activity()
    return f"{member} has not called push" + ("" if activity == "it runs" else f": {activity}")
