"""The numbers of a trace: who communicates how much, what of it is hidden behind compute, who is late, what costs most.

Never imports torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from unisono.trace.intervals import Interval, clipped, common, length, minus, union
from unisono.trace.record import CallRecord, DeviceCall, RankRecord
from unisono.units import name_ranks, show_nbytes, show_ranks, show_seconds

__all__ = ["Bound", "CallSum", "DeviceSum", "RankSum", "Summary", "summarize"]

Bound = Callable[[str, int, int], float]
"""bound(op, nbytes as nccl-tests count, ranks) -> seconds, the least time of a call; 0 for unknown."""
_TOP = 12


@dataclass(frozen=True)
class RankSum:
    """One rank, in seconds of the window that all ranks share.

    ``exposed`` is the time in which the main thread was inside a call or a wait, or stood still while a call was under
    way; of that ``waiting`` before other ranks had come. ``overlapped`` is the time in which a call was under way while
    the main thread did something else. Of the calls that are ``compared`` with other ranks' ``late`` is the mean delay
    behind the first rank, and ``last`` the share of those for which this rank came last.
    """

    rank: int
    exposed: float
    waiting: float
    overlapped: float
    calls: int
    nbytes: int
    compared: int
    late: float
    last: float

    @property
    def communicating(self) -> float:
        """Seconds in which something was under way."""
        return self.exposed + self.overlapped


@dataclass(frozen=True)
class CallSum:
    """All calls of one kind from one place: ``count`` and ``seconds`` are means over the ranks that make them.

    ``mean`` is per call; ``bound`` is the least time of a call as a share of what it took beyond waiting, 0 if unknown.
    """

    words: str
    site: str
    count: int
    nbytes: int
    seconds: float
    mean: float
    wait: float
    move: float
    reduce: float
    bound: float


@dataclass(frozen=True)
class DeviceSum:
    """Calls on GPUs of one operation that go one way: ``count`` and ``nbytes`` of a rank, the mean over all.

    ``host``: seconds that the host spends on one until it goes on.
    """

    op: str
    way: str
    count: int
    nbytes: int
    host: float


@dataclass(frozen=True)
class Summary:
    """A whole trace. ``seconds`` is the length of the window, from the first call to the last end.

    ``slowest`` is the rank that is furthest behind; ``clearly``, if it is so by a margin; None if no call is known of
    several ranks. ``missing`` are the ranks that left no record. ``partial``: there were more calls than are kept, and
    the window begins with the first one that all ranks have kept.
    """

    program: str
    seconds: float
    ranks: tuple[RankSum, ...]
    top: tuple[CallSum, ...]
    kinds: int
    slowest: int | None
    clearly: bool
    missing: tuple[int, ...]
    partial: bool
    device: tuple[DeviceSum, ...] = ()

    @property
    def share(self) -> float:
        """Share of the window in which a rank communicates; the mean over ranks."""
        return fmean(rank.communicating for rank in self.ranks) / self.seconds if self.seconds else 0.0

    @property
    def exposed(self) -> float:
        """Share of the window in which a rank does nothing else; the mean over ranks."""
        return fmean(rank.exposed for rank in self.ranks) / self.seconds if self.seconds else 0.0

    def words(self) -> list[str]:
        """The summary in lines of text."""
        lines = [
            f"{show_ranks(len(self.ranks))}, {self.seconds:.2f} s {self.span}: {self.share:.1%} of it communicating, "
            f"{self.exposed:.1%} exposed, {self.share - self.exposed:.1%} overlapped with compute"
        ]
        if self.missing:
            lines.append(f"{self.absence}; the numbers are of the others")
        rank = next((r for r in self.ranks if r.rank == self.slowest), None)
        if rank is not None:
            margin = "" if self.clearly else ", though not by much"
            lines.append(
                f"the slowest is rank {rank.rank}{margin}: last to come in {rank.last:.0%} of the calls, "
                f"{rank.late * 1e3:.2f} ms behind the first rank on average"
            )
        elif len(self.ranks) + len(self.missing) > 1:
            lines.append("no rank is called slow: there is no collective of which several ranks left a record")
        lines += [
            f"on GPUs a rank issues {kind.count:,} {kind.op} by {kind.way}, {show_nbytes(kind.nbytes)} in all; "
            f"its host spends {show_seconds(kind.host)} on each"
            for kind in self.device
        ]
        return lines

    @property
    def span(self) -> str:
        """The window in words."""
        if self.partial:
            return "up to the last call (before that there were more calls than are kept)"
        return "from the first call to the last"

    @property
    def absence(self) -> str:
        """The missing ranks, and why; empty if there are none."""
        if not self.missing:
            return ""
        return f"{name_ranks(self.missing)} left no record (killed, or made no call)"


def summarize(records: Sequence[RankRecord], bound: Bound) -> Summary:
    """Add a trace up."""
    times = [interval for record in records for interval in record.intervals]
    window = min((begin for begin, _ in times), default=0), max((end for _, end in times), default=0)
    ranks = tuple(_rank(record, window) for record in records)
    top = _kinds(records, bound)
    compared = [rank for rank in ranks if rank.compared]
    slowest = max(compared, key=lambda rank: (rank.late, -rank.rank), default=None)
    known = {rank for record in records for group in record.groups.values() for rank in group}
    return Summary(
        program=records[0].program,
        seconds=(window[1] - window[0]) / 1e9,
        ranks=ranks,
        top=tuple(top[:_TOP]),
        kinds=len(top),
        slowest=slowest.rank if slowest is not None else None,
        clearly=slowest is not None and _clearly(slowest, compared),
        missing=tuple(sorted(known - {record.rank for record in records})),
        partial=any(record.since for record in records),
        device=_devices(records),
    )


def _devices(records: Sequence[RankRecord]) -> tuple[DeviceSum, ...]:
    """Calls on GPUs by operation and way, those with the most bytes first."""
    found: dict[tuple[str, str], list[DeviceCall]] = {}
    for call in (call for record in records for call in record.device_calls):
        found.setdefault((call.op, call.way), []).append(call)
    sums = [
        DeviceSum(op, way, round(len(calls) / len(records)), sum(call.nbytes for call in calls) // len(records),
                  fmean(call.end - call.begin for call in calls) / 1e9)
        for (op, way), calls in found.items()
    ]  # fmt: skip
    return tuple(sorted(sums, key=lambda kind: (-kind.nbytes, kind.op, kind.way)))


def _rank(record: RankRecord, window: Interval) -> RankSum:
    exposed = clipped(union([*record.inside, *record.still]), window)
    together = [call for call in record.calls if call.compared]
    return RankSum(
        rank=record.rank,
        exposed=length(exposed) / 1e9,
        waiting=length(common(exposed, (call.wait for call in record.calls))) / 1e9,
        overlapped=length(minus(record.flying, exposed)) / 1e9,
        calls=len(record.calls),
        nbytes=sum(call.nbytes for call in record.calls),
        compared=len(together),
        late=fmean(call.late for call in together) / 1e9 if together else 0.0,
        last=fmean(call.begin == call.ready and call.late > 0 for call in together) if together else 0.0,
    )


def _clearly(slowest: RankSum, ranks: Sequence[RankSum]) -> bool:
    """True if it comes last half as often again as by chance, and is a quarter more behind than the others are."""
    others = [rank.late for rank in ranks if rank is not slowest]
    return bool(others) and slowest.last >= 1.5 / len(ranks) and slowest.late >= 1.25 * fmean(others)


def _kinds(records: Sequence[RankRecord], bound: Bound) -> list[CallSum]:
    """Calls of one kind and place together, the costliest first."""
    found: dict[tuple[str, str], list[CallRecord]] = {}
    makers: dict[tuple[str, str], set[int]] = {}
    for record in records:
        for call in record.calls:
            found.setdefault((call.words, call.site), []).append(call)
            makers.setdefault((call.words, call.site), set()).add(record.rank)
    sums = [_kind(calls, len(makers[kind]), bound) for kind, calls in found.items()]
    return sorted(sums, key=lambda kind: -kind.seconds)


def _kind(calls: list[CallRecord], ranks: int, bound: Bound) -> CallSum:
    first = calls[0]
    total = sum(call.end - call.begin for call in calls)
    waiting = sum(length([call.wait]) for call in calls)
    reducing = sum(length(call.reductions) for call in calls)
    least = bound(first.op, first.nbytes, len(first.ranks))
    alone = (total - waiting) / 1e9 / len(calls)
    return CallSum(
        words=first.words,
        site=first.site,
        count=round(len(calls) / ranks),
        nbytes=first.nbytes,
        seconds=total / 1e9 / ranks,
        mean=total / 1e9 / len(calls),
        wait=waiting / total if total else 0.0,
        move=(total - waiting - reducing) / total if total else 0.0,
        reduce=reducing / total if total else 0.0,
        bound=least / alone if alone else 0.0,
    )
