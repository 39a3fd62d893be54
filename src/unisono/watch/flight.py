"""The flight record: the last calls of this process, kept in memory, written out when something goes wrong.

Every queue keeps the last ``UNISONO_FLIGHT`` calls (2000; 0 keeps none): what was called, when it was issued, when it
ended, from which line if that is known. Keeping a call costs three stores. When a call fails, each rank writes
what it has into the directory ``UNISONO_FLIGHT_DIR``, if that is set, and asks its peers to do the same; on demand
`dump_flight_record` or ``unisono ps --dump`` write it. The file is a pickle in the schema of PyTorch's flight recorder
(fr_schema.py), so that PyTorch's own analyzer reads a directory of them: ``python -m
torch.distributed.flight_recorder.fr_trace DIR``. Never imports torch.
"""

import contextlib
import itertools
import logging
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import CollectiveTimeout, DeadlockError, MismatchError, PeerLostError, UsageError, file_errors
from unisono.runtime.call_site import Site, is_inner
from unisono.runtime.monitor import CallLog
from unisono.watch import fr_schema
from unisono.watch.fr_schema import Entry

if TYPE_CHECKING:
    from unisono.runtime.call import Call

__all__ = [
    "CollectiveRecord",
    "MessageRecord",
    "Note",
    "QueueRecord",
    "dump_flight_record",
    "everything",
    "save_after",
]

_FILE_PREFIX = "flight_rank_"
"""A dump is this, then the global rank."""

_FAULTS = (PeerLostError, DeadlockError, CollectiveTimeout, MismatchError)
_records: "weakref.WeakSet[QueueRecord]" = weakref.WeakSet()
_drafts = itertools.count()
_TRIES, _STILL = 20, 0.0002  # looks at a queue until it has stood still for that long, s


def _capacity() -> int:
    text = os.environ.get("UNISONO_FLIGHT") or "2000"
    if not text.isdecimal():
        raise UsageError(f"UNISONO_FLIGHT is {text!r}, expected how many calls to keep: 2000, or 0 for none")
    return int(text)


class QueueRecord(ABC):
    """The last calls of one rank in one queue of a group.

    ``global_ranks`` are those of the group; ``memory`` is the nonce of its shared memory, by which all ranks can tell
    it from any other group, of the same label too.
    """

    def __init__(self, label: str, global_ranks: Sequence[int], rank: int, memory: str = "") -> None:
        self.label, self.global_ranks, self.rank, self.memory = label, list(global_ranks), rank, memory
        self.capacity = _capacity()
        _records.add(self)

    @property
    @abstractmethod
    def overflows(self) -> bool:
        """True if there were more calls than are kept."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """The entries that are kept, oldest first."""


class CollectiveRecord(QueueRecord):
    """Collectives end in the order in which they were issued, so that a few rings side by side tell all.

    ``counts`` gives how many were issued and completed so far, and how many were issued by the rank of the group that
    has issued most: entries start with the first call that all ranks still keep.
    """

    def __init__(
        self,
        label: str,
        global_ranks: Sequence[int],
        rank: int,
        counts: Callable[[], tuple[int, int, int]],
        memory: str = "",
    ) -> None:
        super().__init__(label, global_ranks, rank, memory)
        places = max(1, self.capacity)
        self.call_log = CallLog([None] * places, array("q", bytes(8 * places)), array("q", bytes(8 * places)))
        self._sites: dict[int, Site] = {}
        self._counts = counts

    @property
    def overflows(self) -> bool:  # noqa: D102
        return self._counts()[2] > self.capacity

    def locate(self, number: int, site: Site) -> None:
        """Adds where a call was made, which is found out only if it takes long or goes wrong."""
        if len(self._sites) >= len(self.call_log.calls):
            self._sites.pop(next(iter(self._sites)))
        self._sites[number] = site

    def entries(self) -> Iterator[Entry]:  # noqa: D102
        for _ in range(_TRIES):  # the counts and the rings are not written at one moment
            counts = self._counts()
            calls, issue_times, end_times = (
                list(self.call_log.calls),
                list(self.call_log.issue_times),
                list(self.call_log.end_times),
            )
            sites = dict(self._sites)
            time.sleep(_STILL)
            if self._counts() == counts:
                break
        issued, completed, newest = counts
        for number in range(max(1, newest - self.capacity + 1), issued + 1):
            place = number % len(calls)
            call = calls[place]
            if call is not None and number > issued - self.capacity:
                late = "started" if number == completed + 1 else "scheduled"
                state, end = ("completed", end_times[place]) if number <= completed else (late, 0)
                yield Entry(
                    self.label, self.global_ranks, number, call, state, issue_times[place], end, sites.get(number)
                )


@dataclass(slots=True)
class Note:
    """A message as it is kept: its call, when it was issued, from where, with whom, its number, when it ended."""

    call: "Call"
    when: int
    peer: int | None
    tag: int
    site: Site | None = None
    number: int = 0
    ended: int = 0


class MessageRecord(QueueRecord):
    """Messages end in any order; the k-th send to a rank with a tag is the k-th receive there from here."""

    def __init__(self, label: str, global_ranks: Sequence[int], rank: int, memory: str = "") -> None:
        super().__init__(label, global_ranks, rank, memory)
        self._kept: deque[Note | tuple[Any, ...]] = deque(maxlen=self.capacity)  # a tuple is quicker to make
        self._counts: Counter[tuple[str, int, int]] = Counter()

    @property
    def overflows(self) -> bool:  # noqa: D102
        return len(self._kept) >= self.capacity

    @property
    def notes(self) -> list[Note]:
        """The last messages."""
        return [kept if isinstance(kept, Note) else Note(*kept) for kept in list(self._kept)]

    def issue(self, call: "Call", peer: int | None, tag: int) -> Note:
        """Takes a message in; ``peer`` is a rank of the group, or None for a receive from any."""
        note = Note(call, time.monotonic_ns(), peer, tag)
        if call.op == "send" and peer is not None:
            note.number = self._next(call.op, peer, tag)
        self._kept.append(note)
        return note

    def end(self, note: Note, source: int) -> None:
        """A message has been moved; ``source`` is the group rank that sent it."""
        note.ended = time.monotonic_ns()
        if note.call.op == "recv":
            note.peer, note.number = source, self._next("recv", source, note.tag)

    def moved(self, call: "Call", peer: int, tag: int, when: int) -> None:
        """A message, issued at ``when``, that was moved within its call."""
        key = (call.op, peer, tag)
        number = self._counts[key] = self._counts[key] + 1
        self._kept.append((call, when, peer, tag, None, number, time.monotonic_ns()))

    def fail(self, note: Note) -> None:
        """A message will never be moved; its number is not given to another."""
        if not note.number and note.peer is not None:
            note.number = self._next(note.call.op, note.peer, note.tag)

    def _next(self, op: str, peer: int, tag: int) -> int:
        key = (op, peer, tag)
        number = self._counts[key] = self._counts[key] + 1
        return number

    def entries(self) -> Iterator[Entry]:  # noqa: D102
        mine, counts = self.global_ranks[self.rank], self._counts.copy()
        for note in self.notes:
            if note.peer is None or note.peer == self.rank:
                continue  # a pair of ranks is what the analyzer can follow
            number = note.number
            if not number:
                counts["recv", note.peer, note.tag] += 1
                number = counts["recv", note.peer, note.tag]
            theirs = self.global_ranks[note.peer]
            source, target = (mine, theirs) if note.call.op == "send" else (theirs, mine)
            label = f"{self.label}, messages {source}->{target}" + (f" tag {note.tag}" if note.tag else "")
            state = "completed" if note.ended else "started"
            pair = sorted((source, target))
            way = (pair.index(source), pair.index(target))
            yield Entry(label, pair, number, note.call, state, note.when, note.ended, note.site, way)


def dump_flight_record(path: str | os.PathLike[str]) -> Path:
    """Writes this rank's last calls into the directory ``path``, which is made if need be; returns the file.

    The file is called ``flight_rank_<global rank>``; an older one is replaced. When all ranks have written theirs,
    ``python -m torch.distributed.flight_recorder.fr_trace DIR`` compares them.

    Raises `UsageError` if this process is in no group, or the directory cannot be written.
    """
    records = sorted(_records, key=lambda record: len(record.global_ranks), reverse=True)
    if not records:
        raise UsageError("no flight record: this process is in no group of unisono that is alive")
    entries = [entry for record in records for entry in record.entries()]
    groups = {record.label: record.global_ranks for record in records}
    data = fr_schema.dump(entries, groups, _stack_of_main())
    target = Path(path) / f"{_FILE_PREFIX}{records[0].global_ranks[records[0].rank]}"
    draft = target.with_name(f".writing-{os.getpid()}-{next(_drafts)}.tmp")
    with file_errors(f"write the flight record {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(pickle.dumps(data, protocol=4))
        draft.replace(target)
    return target


def everything() -> list[tuple[QueueRecord, list[Entry], bool]]:
    """The entries of every live queue of this process, oldest first, and whether older ones are lost."""
    found: list[tuple[QueueRecord, list[Entry], bool]] = []
    for record in list(_records):
        with contextlib.suppress(ValueError):  # the group has been left, its memory is gone
            found.append((record, list(record.entries()), record.overflows))
    return found


def save_after(error: BaseException, ask_peers: Callable[[str], object]) -> None:
    """Writes the record if ``error`` is a fault and a directory is configured, and asks the peers to do so.

    Raises nothing: what goes wrong here must not hide the error.
    """
    folder = os.environ.get("UNISONO_FLIGHT_DIR", "")
    if not folder or not isinstance(error, _FAULTS):
        return
    try:
        dump_flight_record(folder)
    except UsageError as trouble:
        logging.getLogger("unisono").warning("%s", trouble)
    ask_peers(os.path.abspath(folder))


def _stack_of_main() -> list[Site]:
    """The user's frames of the main thread, innermost first: where a call that is not done was made."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    return [(f.filename, f.lineno or 0, f.name) for f in reversed(stack) if not is_inner(f.filename)]
