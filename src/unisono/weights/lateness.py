"""Words on who has not come to an update, and what they do instead."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from unisono.units import name_ranks, show_count
from unisono.weights.parties import Attempt, Member

if TYPE_CHECKING:
    from unisono.weights.coordinator import Coordinator

__all__ = ["doing", "nobody_pushes"]


def doing(attempt: Attempt, member: Member) -> str:
    """What a member does instead of reporting."""
    activity = member.who.activity()
    if activity != "it runs":
        return f"has not come: {activity}"
    if attempt.awaited == "shown" or (attempt.awaited == "ready" and member.held):
        return "still holds the version before"
    if attempt.awaited == "ready":
        return "has not called " + ("push" if member.party.sender else "pull")
    return f"has not finished ({member.reached or 'announced'}); {activity}"


def nobody_pushes(hub: "Coordinator", pushing: Collection[int], receivers: int, waited: float, last: str) -> str:
    """Who has not come to a push: ranks of the sender besides ``pushing``, or replicas; ``last``: who was there."""
    absent = [rank for rank in range(hub.own.world_size) if rank not in pushing]
    if absent:
        return f"after {waited:.3g} s {name_ranks(absent)} of the sender has not called push"
    there = [str(party) for party in hub.parties.values() if party.complete]
    part = [party.absence() for party in hub.parties.values() if not party.complete]
    words = f"{show_count(len(there), 'replica')} of {max(receivers, 1)} joined in {waited:.3g} s"
    words += f" ({', '.join([*there, *part])})" if there or part else ""
    ended = f"; {last} was there last" if last and not there else ""
    return f"{words} at {hub.address}{ended}: start receivers with this address"
