"""What an error over a rank that is late says of it, and what of that is a cause for others."""

import pytest

from unisono.watch.peer_state import Lateness

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
