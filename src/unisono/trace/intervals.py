"""Sets of moments as sorted lists of disjoint (begin, end), in nanoseconds."""

from collections.abc import Iterable

__all__ = ["Interval", "clipped", "common", "length", "minus", "union"]

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments that are in any of the intervals."""
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def minus(whole: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The difference of two sets: the first without the second."""
    holes, found = union(taken), []
    at = 0
    for begin, end in union(whole):
        while at < len(holes) and holes[at][1] <= begin:
            at += 1
        k = at
        while k < len(holes) and holes[k][0] < end:
            if begin < holes[k][0]:
                found.append((begin, holes[k][0]))
            begin = max(begin, holes[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found


def common(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The intersection of two sets."""
    one = union(one)
    return minus(one, minus(one, other))


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The intervals, cut to the window."""
    cut = [(max(begin, window[0]), min(end, window[1])) for begin, end in intervals]
    return [(begin, end) for begin, end in cut if begin < end]


def length(intervals: Iterable[Interval]) -> int:
    """Nanoseconds in all; of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
