"""What an error over a rank that is late says of it, and what of that is a cause for others."""

from types import SimpleNamespace
from typing import Any

import pytest

from unisono.transport.layout import GAVE_UP, Layout
from unisono.transport.process import Identity
from unisono.watch.exit_notes import exit_note
from unisono.watch.peer_state import Lateness, PeerState

DONE = "rank 1 (pid 80 on node1) last completed call no. 3 barrier() 0.4 s ago"
FAILED = "CollectiveTimeout: send() did not end; it is stopped (by a signal or in a debugger)"


@pytest.mark.parametrize(
    ("doing", "idle"),
    [
        ("now at train.py:31 in step", False),
        ("it is stopped (by a signal or in a debugger)", True),
        ("it does not answer (busy outside Python, holding the interpreter lock)", True),
    ],
)
def test_a_rank_that_does_nothing_is_a_cause_whatever_it_has_failed_in(doing: str, idle: bool) -> None:
    late = Lateness(DONE, doing, FAILED)
    assert late.line == f"{DONE}; {doing}; the last of its messages that failed: {FAILED}"
    assert late.cause == (f"{DONE}; {doing}" if idle else "")


def test_a_rank_that_has_never_joined_is_no_cause() -> None:
    late = Lateness("rank 1 has never joined this group", "", "")
    assert (late.line, late.cause) == ("rank 1 has never joined this group", "")


class OtherHost(tuple[int, ...]):
    """Ranks of another host, of which rank 1 has given up over rank 2 and left: nobody answers any more."""

    local = (0,)

    def who(self, rank: int, name: int) -> str:
        return f"rank {name} (pid {80 + rank} on node1)"

    def ended(self, rank: int) -> tuple[int, str] | None:
        return (GAVE_UP, exit_note("did not end", f"{self.who(2, 2)} is stopped")) if rank == 1 else None

    def activities(self, ranks: object, patience: float) -> dict[int, Any]:
        return {}

    def proxies(self, rank: int) -> set[int]:
        return set()


def test_who_has_left_before_it_was_asked_has_said_over_whom() -> None:
    segment: Any = SimpleNamespace(
        elsewhere=OtherHost((1, 2)), longs=[0] * 8, layout=Layout(3), field=lambda rank, field: 0,
        identity=lambda rank: Identity(0, 0), state=lambda rank: 0, text=lambda rank, kind: "", absentees=None,
    )  # fmt: skip
    first, second = str(PeerState(segment, [0, 1, 2]).late("barrier()", [1, 2])).splitlines()[1:]
    assert first == "  rank 1 (pid 81 on node1) has given this group up over it: rank 2 (pid 82 on node1) is stopped"
    assert second.startswith("  rank 2 (pid 82 on node1) has not completed a call in this group")
    assert second.endswith("it does not answer")
