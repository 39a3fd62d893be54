"""The critical path: the chain of messages that the last rank to end has waited for, from its end back to time zero.

At a rank, the chain follows the message that kept it in a step longest; at a message, whichever of its ends was ready
later. A message that found its port taken was kept by the first message in that queue, and the chain goes on there.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from unisono.simulation.clock import Setting, Times, play, sum_seconds
from unisono.simulation.slots import Floats, Load, Part
from unisono.units import show_nbytes, show_seconds

__all__ = ["CriticalPath", "Hop", "critical_path"]

_LOG_LIMIT = 1 << 20  # messages that are remembered
_SAME = 1e-9


@dataclass(frozen=True)
class Hop:
    """One message on the path; times in seconds. `waiting` is the end of it that the path came from.

    `queued` is how long it waited for a port, `summing` how long the waiting rank then summed.
    """

    step: int
    src: int
    dst: int
    nbytes: float
    link: str
    alpha: float
    start: float
    end: float
    waiting: int
    queued: float
    summing: float

    def __str__(self) -> str:
        what = f"{show_nbytes(self.nbytes)} over {self.link}"
        if self.waiting == self.dst:
            text = f"rank {self.dst} waits for rank {self.src}: {what}"
        else:
            text = f"rank {self.src} waits for rank {self.dst} to take {what}"
        if self.queued > _SAME * self.end:
            text += f", {show_seconds(self.queued)} in line for a port"
        if self.summing:
            text += f", then sums for {show_seconds(self.summing)}"
        return f"{show_seconds(self.start):>8}  step {self.step}: {text}"


@dataclass(frozen=True)
class CriticalPath:
    """Hops from first to last; `last` is the rank that ends last, at `time` seconds.

    If `complete` is false the hops are the end of the path: what came before passed too fast to be looked at.
    """

    hops: tuple[Hop, ...]
    last: int
    time: float
    complete: bool

    def lines(self, limit: int = 40) -> list[str]:
        """In words, one line per hop, at most the last `limit` of them."""
        shown = self.hops[-limit:] if limit else ()
        hidden = len(self.hops) - len(shown)
        lines = [] if self.complete else ["     ...  many steps alike"]
        if hidden:
            lines.append(f"     ...  {hidden} earlier messages")
        lines += [str(hop) for hop in shown]
        lines.append(f"{show_seconds(self.time):>8}  rank {self.last} is the last to end")
        return lines

    def shares(self) -> dict[str, float]:
        """Seconds of a complete path by what they went into: alpha, bytes, queue, sum."""
        parts = {
            "alpha": sum(hop.alpha for hop in self.hops),
            "bytes": sum(hop.end - hop.start - hop.alpha for hop in self.hops),
            "sum": sum(hop.summing for hop in self.hops),
        }
        return {**parts, "queue": max(self.time - sum(parts.values()), 0.0)}


@dataclass(frozen=True)
class _Entry:
    parts: tuple[Part, ...]
    load: Load
    times: Times

    def step(self, message: int) -> int:
        """The explicit step a message belongs to."""
        lengths = np.cumsum([len(part.compact) for part in self.parts])
        return self.parts[int(np.searchsorted(lengths, message, side="right"))].step


class _Log:
    """Remembers the last slots, up to _LOG_LIMIT messages."""

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()
        self.messages = 0
        self.complete = True

    def wants(self, messages: int) -> bool:
        if messages > _LOG_LIMIT // 4:
            self.entries.clear()
            self.messages, self.complete = 0, False
            return False
        return True

    def see(self, parts: tuple[Part, ...], load: Load, times: Times) -> None:
        self.entries.append(_Entry(parts, load, times))
        self.messages += len(load)
        while self.messages > _LOG_LIMIT and len(self.entries) > 1:
            self.messages -= len(self.entries.popleft().load)
            self.complete = False


@dataclass
class _Place:
    """The present end of the path: a rank, or a port (its side and id) if that is >= 0."""

    rank: int
    side: str = ""
    port: int = -1


def critical_path(setting: Setting) -> CriticalPath:
    """Play the schedule once more, remembering, then walk back from the rank that ends last."""
    log = _Log()
    clock = play(setting, log)
    last = int(np.argmax(clock.ready[: setting.topology.world_size]))
    place = _Place(last)
    hops: list[Hop] = []
    for entry in reversed(log.entries):
        m = _decisive(entry, place, setting.eager)
        if m is None:
            continue
        hops.append(_hop(entry, m, place, setting, clock.gamma))
        place = _back(entry, m, setting.eager)
    return CriticalPath(tuple(reversed(hops)), last, float(clock.ready[last]), log.complete)


def _decisive(entry: _Entry, place: _Place, eager: bool) -> int | None:
    """The message of this slot that kept the place longest, or None if it was not kept here."""
    load, times = entry.load, entry.times
    if place.port >= 0:
        there = np.flatnonzero((load.out if place.side == "out" else load.into) == place.port)
        return int(there[np.argmax(times.left[there])]) if len(there) else None
    there = np.flatnonzero((load.src == place.rank) | (load.dst == place.rank))
    if not len(there):
        return None
    receives = load.dst[there] == place.rank
    kept = np.where(receives | (not eager), times.end[there], times.left[there])
    best = int(np.argmax((kept >= kept.max() * (1 - _SAME)) * (1 + receives)))  # of equals, what it received
    before = (times.receiver_ready if receives[best] else times.sender_ready)[there[best]]
    return int(there[best]) if kept[best] >= before else None


def _hop(entry: _Entry, m: int, place: _Place, setting: Setting, gamma: Floats) -> Hop:
    load, times = entry.load, entry.times
    src, dst = int(load.src[m]), int(load.dst[m])
    waiting = src if place.rank == src and place.port < 0 else dst
    ready = times.sender_ready[m] if setting.eager else max(times.sender_ready[m], times.receiver_ready[m])
    summed = (load.dst == waiting) & (place.port < 0)
    return Hop(
        entry.step(m),
        src,
        dst,
        float(load.nbytes[m]),
        setting.topology.link(src, dst).name,
        float(load.alpha[m]),
        float(times.start[m]),
        float(times.end[m]),
        waiting,
        float(times.start[m] - ready),
        float(sum_seconds(load, gamma)[summed].sum()),
    )


def _back(entry: _Entry, m: int, eager: bool) -> _Place:
    """The wait of the message, or of the one at the head of its line, before it started."""
    times = entry.times
    head, port = int(times.head[m]), int(times.taken[m])
    if port >= 0:
        return _Place(-1, "out" if times.by_out[m] else "into", port)
    if not eager and times.receiver_ready[head] > times.sender_ready[head]:
        return _Place(int(entry.load.dst[head]))
    return _Place(int(entry.load.src[head]))
