"""Deadlocks between groups on GPUs: calls that two ranks issue in opposite orders, each on one stream.

A kernel of a call ends when the kernels of all ranks have met, and on a stream it begins when those before it have
ended. So two calls that one rank issues the one way round and another rank the other way round never end. The order is
known when both have been issued: nothing has to be waited for, and what was found stays true. Calls of graphs and those
that NCCL carries, on streams of its own, are left out.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Issued", "crossed", "order_word", "stream_of"]

_STREAM = (1 << 24) - 1
_orders = itertools.count(1)  # over all groups of this process


@dataclass(frozen=True, slots=True)
class Issued:
    """A call that this rank and ``peer``, a global rank, have both issued, with its `order_word` on either side;
    ``group``: its guard.
    """

    group: object
    words: str
    peer: int
    mine: int
    theirs: int


def order_word(stream: int) -> int:
    """What a rank publishes of the next call of its process, on the raw stream ``stream``: its place in the order of
    issue, and the stream.
    """
    return next(_orders) << 24 | (stream >> 4) + 1 & _STREAM


def stream_of(word: int) -> int:
    """What is equal for calls on one stream of a process; 0 for calls without an order."""
    return word & _STREAM


def crossed(calls: Iterable[Issued]) -> tuple[Issued, Issued] | None:
    """Two calls in the order of this rank, which the peer has issued the other way round; None if there are none."""
    for alike in _on_one_stream(calls):
        last = alike[0]
        for call in alike[1:]:
            if call.theirs < last.theirs:
                return last, call
            last = call
    return None


def _on_one_stream(calls: Iterable[Issued]) -> Iterator[list[Issued]]:
    """Calls with one peer, on one stream here and on one there, in the order of this rank."""
    found: dict[tuple[int, int, int], list[Issued]] = {}
    for call in calls:
        if stream_of(call.mine) and stream_of(call.theirs):
            found.setdefault((call.peer, stream_of(call.mine), stream_of(call.theirs)), []).append(call)
    for alike in found.values():
        yield sorted(alike, key=lambda call: call.mine)
