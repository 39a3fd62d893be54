"""Ranks of one replica show a version between the same holds, where their parts of tensors make sense together alone.

A forward pass under `hold` takes all ranks of a tensor-parallel replica, so all must see one version in it. Once a
version is decided each rank lets no new hold begin and reports how many have (`held`); the sender's rank 0 sends the
largest number (`show`), and each rank shows the version after so many. Ranks do not hold alike in every program: once
all others have shown it, one that is idle waits for holds to come a little longer, and not for ever.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from unisono.weights.wire import Broken, Message

if TYPE_CHECKING:
    from unisono.weights.hold import Holds
    from unisono.weights.parties import Member, Party
    from unisono.weights.plan import Plan
    from unisono.weights.wire import Connection

__all__ = ["begin_together", "depend", "let_show", "take_report"]

_LOOK = 0.01  # s between two looks at the connection
_ALONE = 0.25  # s that an idle rank waits for holds that the others have had

Send = Callable[..., None]


def depend(plan: "Plan", replica: int) -> bool:
    """True if ranks of a replica hold different parts of what they receive."""
    layout = plan.receivers[replica]
    return any(len({*layout[name].parts}) > 1 for name in plan.fits[replica].tensors)


# At a rank


def begin_together(
    connection: "Connection", holds: "Holds", number: int, deadline: float, late: Callable[[], None]
) -> bool:
    """As `Holds.begin`, after as many holds as any rank of the replica has begun."""
    try:
        until = _wait_for_holds(connection, holds, number, deadline)
    except Broken:
        until = 0  # the version is decided, though nobody is there to ask
    except BaseException:
        holds.resume()
        raise
    return holds.begin(deadline, late, until)


def _wait_for_holds(connection: "Connection", holds: "Holds", number: int, deadline: float) -> int:
    """Returns the number of holds after which the version is shown, once they have begun, or none is waited for."""
    connection.send("held", number=number, count=holds.pause())
    message = _next(connection, number, deadline)
    until = int(message["count"]) if message is not None else 0
    others_show, idle = False, 0.0
    while holds.behind(until, _LOOK) and time.monotonic() < deadline:
        others_show = others_show or _next(connection, number, 0.0) is not None
        idle = idle + _LOOK if others_show and not holds.held else 0.0
        if idle >= _ALONE:
            return 0
    return until


def _next(connection: "Connection", number: int, deadline: float) -> Message | None:
    """The lead's next word on an update's holds; None if there is none in time, or something else has come."""
    while (message := connection.wait(deadline) if deadline else connection.receive()) is not None:
        if message.kind != "show":
            connection.unread(message)
            return None
        if message["number"] == number:
            return message
    return None


# At the sender's rank 0


def take_report(send: Send, member: "Member", message: Message) -> None:
    """Takes a report of a rank: how many holds it has begun, or that it shows the version, or can not."""
    party, ranks = member.party, member.party.ranks
    if message.kind == "held":
        member.waits, member.begun = int(message["number"]), int(message["count"])
        waiting = [each for each in ranks if each.waits == member.waits]
        # one that writes in place reports no holds: it may show the version already
        if party.complete and all(each in waiting or each.reached == "shown" for each in ranks):
            for each in waiting:
                send(each, "show", number=member.waits, count=max(other.begun for other in waiting))
        return
    alike, member.waits = bool(member.waits), 0
    most = max((each.begun for each in ranks), default=0)
    if not alike or all(each.begun < most for each in ranks if each.waits):
        let_show(send, party)


def let_show(send: Send, party: "Party") -> None:
    """The other ranks of a replica show the version, or are gone: those that wait for holds need not for long."""
    for each in party.ranks:
        if each.waits:
            send(each, "show", number=each.waits, count=0)
            each.waits = 0
