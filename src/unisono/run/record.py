"""What happened when: the messages of a run, so that it can be drawn like a simulated timeline.

Times are `time.monotonic()` seconds, which all processes of a host share. A message starts when its sender posts it and
ends when its receiver has it.

    records = [Record() for _ in range(4)]            # one per rank
    run(schedule, x, transport, record=records[rank])
    events = merged(records)                          # arrays, one entry per message
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from unisono.simulate.events import Events

__all__ = ["Event", "Record", "merged"]


@dataclass(frozen=True, slots=True)
class Event:
    """One end of a message: rank `src` sends it, or rank `dst` receives it (`sent` tells which).

    `count` chunks from `chunk` on, counting those that are in the message; `piece` numbers the parts in which a large
    tensor is walked; times in seconds.
    """

    sent: bool
    step: int
    piece: int
    src: int
    dst: int
    chunk: int
    count: int
    start: float
    end: float
    nbytes: float
    reduce: bool


@dataclass
class Record:
    """What one rank did in the runs it was given to, in the order in which messages ended. Can be pickled."""

    events: list[Event] = field(default_factory=list)

    @staticmethod
    def now() -> float:
        """Seconds on the clock that all ranks of a host share."""
        return time.monotonic()


def merged(records: Sequence[Record]) -> Events:
    """The messages of one run from all ranks' records, by step and start; seconds from the first start.

    A message starts where its sender says and ends where its receiver says; of one whose other end was not recorded,
    what is known stands.
    """
    starts: dict[tuple[int, ...], float] = {}
    messages: dict[tuple[int, ...], Event] = {}
    for event in (e for record in records for e in record.events):
        key = (event.step, event.piece, event.src, event.dst)
        if event.sent:
            starts[key] = event.start
            messages.setdefault(key, event)
        else:
            messages[key] = event
    rows = [(e, starts.get(key, e.start)) for key, e in messages.items()]
    rows.sort(key=lambda row: (row[0].step, row[1], row[0].src, row[0].dst))
    begin = min((start for _, start in rows), default=0.0)
    columns = {f.name: [getattr(e, f.name) for e, _ in rows] for f in fields(Events)}
    columns["start"] = [start - begin for _, start in rows]
    columns["end"] = [e.end - begin for e, _ in rows]
    return Events(**{name: np.array(values, dtype=_kind(name)) for name, values in columns.items()})


def _kind(name: str) -> type:
    return {"start": np.float64, "end": np.float64, "nbytes": np.float64, "reduce": np.bool_}.get(name, np.int64)
