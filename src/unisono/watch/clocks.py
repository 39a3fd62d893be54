"""The clock of the host of a group's first rank, as ranks of other hosts know it: for `unisono trace`.

A rank asks the first one for the time, a few times, when the group is made. The answer counts as read half way between
question and answer, and the quickest of them is kept: what is left is half the difference of the ways there and back
(Cristian, 1989). No call waits for it.
"""

import time

from unisono.runtime.network import Network

__all__ = ["offset", "serve_clock"]

_ROUNDS = 8
_CLOCK = "clock"
_best = (0, 0, 0)  # of the largest group: its size negated, the round trip, the offset, both in ns


def serve_clock(network: Network) -> None:
    """Tells other hosts the time, and asks the group's first rank for it if that is on another host."""
    network.questions.answers[_CLOCK] = lambda body: str(time.monotonic_ns()).encode()
    if 0 in network:
        _ask(network, _ROUNDS)


def _ask(network: Network, rounds: int) -> None:
    asked = time.monotonic_ns()

    def take(answer: bytes) -> None:
        global _best
        taken = time.monotonic_ns() - asked
        found = -len(network.hosts.of), taken, int(answer) - asked - taken // 2
        _best = min(_best, found)
        if rounds > 1:
            _ask(network, rounds - 1)

    network.questions.ask(0, _CLOCK, b"", take)


def offset() -> int:
    """Nanoseconds to be added to this host's ``time.monotonic_ns``, for that of the first rank's host; 0 if none is."""
    return _best[2]
