"""The records of a traced program, read and joined: every call with its phases.

A call's phases on a rank: it *waits* until the last rank of the group has issued the call; from then on it *reduces*
while torch combines parts, and *moves* the rest of the time. Communication is *exposed* while the main thread is inside
a call or a wait, and while it stands still with a call under way, wherever it waits. Never imports torch.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from unisono.errors import UsageError
from unisono.trace.intervals import Interval, clipped, common, minus, union

__all__ = ["CallRecord", "DeviceCall", "RankRecord", "Span", "read"]


@dataclass(frozen=True)
class Span:
    """A thread inside a call, or a wait, of the program's: ``time.monotonic_ns``."""

    name: str
    begin: int
    end: int
    thread: int
    site: str


@dataclass(frozen=True)
class DeviceCall:
    """One call on a GPU, as its host issued it: ``begin`` to ``end`` is the host's time. ``way``: kernel, or NCCL."""

    group: str
    number: int
    op: str
    nbytes: int
    words: str
    way: str
    begin: int
    end: int


@dataclass
class CallRecord:
    """One call on one rank.

    ``memory`` tells its group from any other, ``group`` is its label for people, and ``message`` says from whom to whom
    it goes, if it is one: messages of one way are numbered by themselves. ``late`` is how long after the first
    rank of its group this rank issued it, ns; it is 0 unless the call is ``compared``: known of several ranks.
    """

    memory: str
    group: str
    ranks: Sequence[int]
    number: int
    op: str
    nbytes: int
    words: str
    begin: int
    end: int
    message: str
    site: str = ""
    compared: bool = False
    late: int = 0
    ready: int = 0
    reductions: list[Interval] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int]:
        """The same on all ranks of the call."""
        return self.memory, self.message, self.number

    @property
    def wait(self) -> Interval:
        """From the issue to the moment when all ranks had issued the call."""
        return self.begin, max(self.begin, min(self.ready, self.end))

    @property
    def moves(self) -> list[Interval]:
        """After the wait, without the reductions."""
        return minus([(self.wait[1], self.end)], self.reductions)


@dataclass
class RankRecord:
    """One rank: its calls by begin, the spans of its threads, the file of its compute events if there is one.

    ``groups`` gives the ranks of every group it was in. ``since`` is the moment from which nothing is missing, 0 if
    nothing is. ``marks`` are moments with the time for which the main thread had been busy by then, ns.
    """

    rank: int
    pid: int
    host: str
    program: str
    clock: int
    main: int
    since: int
    groups: Mapping[str, Sequence[int]]
    calls: list[CallRecord]
    spans: list[Span]
    marks: list[tuple[int, int]]
    compute: Path | None
    device_calls: list[DeviceCall]

    @property
    def intervals(self) -> list[Interval]:
        """Begin and end of every call, on GPUs too."""
        on_cpu = [(call.begin, call.end) for call in self.calls]
        return on_cpu + [(call.begin, call.end) for call in self.device_calls]

    @cached_property
    def flying(self) -> list[Interval]:
        """The times at which a call was under way."""
        return union((call.begin, call.end) for call in self.calls)

    @cached_property
    def inside(self) -> list[Interval]:
        """The times at which the main thread was inside a call or a wait."""
        return union((span.begin, span.end) for span in self.spans if span.thread == self.main)

    @cached_property
    def still(self) -> list[Interval]:
        """The times at which it was in no call, but idle while one was under way.

        A thread that waits has computed before: what it was not busy from one mark to the next lies at the end.
        """
        idle = [(since + busy - before, at) for (since, before), (at, busy) in pairwise(self.marks)]
        return minus(common(idle, self.flying), self.inside)


def read(folder: Path) -> list[list[RankRecord]]:
    """The ranks whose records are in the folder, by rank: a list for each launch, the first one first.

    Ranks that were in a group together are of one launch; one that was started anew, by torchrun for example, is of
    another. Raises UsageError if there are no records, or no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no directory {folder}: expected the one that UNISONO_TRACE named")
    files = sorted(file for file in folder.glob("rank-*.json") if not file.name.endswith(".compute.json"))
    launches: list[tuple[set[str], list[RankRecord]]] = []
    for record in map(_rank, files):
        groups, together = set(record.groups), [record]
        for launch in [launch for launch in launches if launch[0] & groups]:
            launches.remove(launch)
            groups |= launch[0]
            together += launch[1]
        launches.append((groups, together))
    if not launches:
        raise UsageError(
            "no rank has left a record: did the program start a group of unisono, make a call in it, and "
            "end by itself? (a killed process writes nothing)"
        )
    found = [sorted(together, key=lambda record: record.rank) for _, together in launches]
    for records in found:
        _cover(records)
        _join(records)
    return sorted(found, key=lambda records: min((times[0] for each in records for times in each.intervals), default=0))


def _rank(file: Path) -> RankRecord:
    """The record in a file, with its times on the clock of the first rank's host."""
    data = json.loads(file.read_text(encoding="utf-8"))
    ahead, rows, issued = data.pop("offset"), data.pop("calls"), data.pop("device_calls")
    for row in rows + issued:
        row["begin"], row["end"] = row["begin"] + ahead, row["end"] and row["end"] + ahead
    calls = sorted((CallRecord(**row) for row in rows if row["end"]), key=lambda call: call.begin)
    noted = (Span(name, begin + ahead, end + ahead, *more) for name, begin, end, *more in data.pop("spans"))
    spans = sorted(noted, key=lambda span: span.begin)
    begins = [span.begin for span in spans]
    for call in calls:
        at = bisect_right(begins, call.begin) - 1
        if at >= 0 and call.begin <= spans[at].end:
            call.site = spans[at].site
    _share_out(union((begin + ahead, end + ahead) for begin, end in data.pop("reductions")), calls)
    data["marks"] = [(at + ahead, busy) for at, busy in data["marks"]]
    data["since"], data["clock"] = data["since"] and data["since"] + ahead, data["clock"] - ahead
    compute = file.with_name(f"{file.stem}.compute.json")
    on_gpus = [DeviceCall(**row) for row in issued]
    return RankRecord(
        **data, calls=calls, spans=spans, device_calls=on_gpus, compute=compute if compute.exists() else None
    )


def _share_out(reductions: list[Interval], calls: Iterable[CallRecord]) -> None:
    """Each reduction belongs to the first issued call that is under way then: a queue carries one after the other."""
    at, done = 0, 0
    for call in sorted((c for c in calls if not c.message), key=lambda call: call.end):
        done = max(done, call.begin)
        while at < len(reductions) and reductions[at][1] <= done:
            at += 1
        k = at
        while k < len(reductions) and reductions[k][0] < call.end:
            call.reductions.append((max(reductions[k][0], done), min(reductions[k][1], call.end)))
            k += 1
        done = max(done, call.end)


def _cover(records: list[RankRecord]) -> None:
    """Takes the calls away that not all ranks have kept, and what lies before."""
    since = max(record.since for record in records)
    early = {call.key for record in records for call in record.calls if call.begin < since}
    for record in records:
        record.since = since
        record.calls = [call for call in record.calls if call.key not in early]
        record.spans = [span for span in record.spans if span.begin >= since]


def _join(records: list[RankRecord]) -> None:
    """Finds out when each call had been issued by all its ranks, and who came how late."""
    alike: dict[tuple[str, str, int], list[CallRecord]] = {}
    for record in records:
        for call in record.calls:
            alike.setdefault(call.key, []).append(call)
    for calls in alike.values():
        first, last = min(call.begin for call in calls), max(call.begin for call in calls)
        for call in calls:
            call.compared = len(calls) > 1 and not call.message
            call.ready = last
            call.late = call.begin - first
            after = (call.wait[1], call.end)
            call.reductions = clipped(call.reductions, after)
