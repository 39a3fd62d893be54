"""The clock: how far every rank and port is in time, what one slot of messages does to it, and the loop over the slots.

- A rank takes its steps in order. It begins one when all its messages of the one before have ended and are summed.
- A message starts when both its ends are ready; it takes alpha + bytes * beta, and its ends are busy until it ends.
  With `eager`, a message starts when its sender is ready, and the sender goes on when its last byte has left: alpha is
  time on the wire, spent by no rank (as with small messages through buffers that are known to be free).
- The messages of a step start together and share ports as well as can be: none waits for another's alpha, and the step
  takes as long as its busiest port (open shop scheduling with preemption). A port serves those that are ready first.
- A port that several ranks share (a NIC) serves in the order of the steps.
- A rank sums what a step brought when the messages of the step are in, one after the other. Switches sum at line rate.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.schedule import Schedule, Topology
from unisono.simulation.slots import Floats, Ints, Load, Part, load_of, slots

__all__ = ["Clock", "Observer", "Setting", "Times", "play", "sum_seconds"]

_LONGEST_RHYTHM = 64
_ALIKE = 1e-9  # relative difference below which two times are the same number, rounded
_SETTLED = 1e-6  # the same for what slots add to the times: who comes first in a tie may change what is beyond


@dataclass(frozen=True)
class Times:
    """The times of the messages of a slot: ready at both ends, start, leave and end, float64 seconds each.

    head: int64, the message at the head of the line each has stood in (itself, if in none). taken: int64, the port that
    an earlier slot kept the head waiting for (-1: none); by_out: bool, whether that line is at the sender's side.
    """

    sender_ready: Floats
    receiver_ready: Floats
    start: Floats
    left: Floats
    end: Floats
    head: Ints
    taken: Ints
    by_out: NDArray[np.bool_]


class Clock:
    """ready: float64, shape (ranks and switches,): when each is done with all slots so far."""

    def __init__(self, topology: Topology, switches: int, eager: bool) -> None:
        self.eager = eager
        self.period = topology.ranks_per_host if topology.ranks_per_host <= _LONGEST_RHYTHM else 1
        self.gamma = np.full(topology.world_size + switches, topology.gamma)
        self.gamma[topology.world_size :] = 0.0
        self.ready = np.zeros(topology.world_size + switches)
        self.first = np.full(topology.world_size + switches, np.inf)
        ports = topology.world_size + topology.hosts * topology.nics
        self._free = {"out": np.zeros(ports + 1), "into": np.zeros(ports + 1)}  # the last one: wires, never waited for

    def advance(self, load: Load) -> Times:
        """Let one slot's messages travel."""
        sender, receiver = self.ready[load.src], self.ready[load.dst]
        begin = sender if self.eager else np.maximum(sender, receiver)
        out_done, out_head, out_taken = self._serve("out", load.out, begin, load)
        into_done, into_head, into_taken = self._serve("into", load.into, begin, load)
        by_out, left = out_done >= into_done, np.maximum(out_done, into_done)
        head, taken = np.where(by_out, out_head, into_head), np.where(by_out, out_taken, into_taken)
        start, end = np.maximum(left - load.work, begin), left + load.alpha
        np.minimum.at(self.first, load.src, start)
        np.minimum.at(self.first, load.dst, start)
        np.maximum.at(self.ready, load.src, left if self.eager else end)
        np.maximum.at(self.ready, load.dst, end)
        if load.reduce.any():
            np.add.at(self.ready, load.dst, sum_seconds(load, self.gamma))
        return Times(sender, receiver, start, left, end, head, taken, by_out)

    def _serve(self, side: str, ports: Ints, begin: Floats, load: Load) -> tuple[Floats, Ints, Ints]:
        """The time each message is through its port, the head of its line, and the port if that was busy."""
        free, held = self._free[side], self._held(side, ports)
        taken = np.where(free[held] > begin, ports, -1)
        begin = np.maximum(begin, free[held])
        if load.shared:
            done, head = _in_turn(ports, begin, load.work)
            taken = taken[head]
        else:
            done, head = begin + load.work, np.arange(len(load))
        np.maximum.at(free, held, done)
        free[-1] = 0.0
        return done, head, taken

    def _held(self, side: str, ports: Ints) -> Ints:
        last = len(self._free[side]) - 1
        return np.where((ports >= 0) & (ports < last), ports, last)

    def advance_alike(self, load: Load, repeat: int) -> None:
        """Let `repeat` slots with the same load pass, in one leap once they settle into a rhythm.

        A slot is linear over (max, +): once every time it touches has grown by one amount over c slots, it will grow
        by that amount over every further c. Rhythms of one slot, and of one slot per rank of a host, are looked for.
        """
        past: deque[Floats] = deque(maxlen=self.period)
        i = 0
        settled = False
        while i < repeat:
            self.advance(load)
            i += 1
            if settled:
                continue
            now = self._touched(load)
            for c in {1, self.period}:
                if len(past) >= c and not settled:
                    growth = now - past[-c]
                    settled = float(np.ptp(growth)) <= _SETTLED * float(growth.max())
                    leaps = (repeat - i) // c if settled else 0
                    self._shift(load, leaps * float(growth.mean()))
                    i += leaps * c
            past.append(now)

    def _touched(self, load: Load) -> Floats:
        sides = [self.ready[load.src], self.ready[load.dst]]
        for side, ports in (("out", load.out), ("into", load.into)):
            held = self._held(side, ports)
            sides.append(self._free[side][held[held < len(self._free[side]) - 1]])
        return np.concatenate(sides)

    def _shift(self, load: Load, seconds: float) -> None:
        self.ready[np.union1d(load.src, load.dst)] += seconds
        for side, ports in (("out", load.out), ("into", load.into)):
            self._free[side][np.unique(self._held(side, ports))] += seconds
            self._free[side][-1] = 0.0


def sum_seconds(load: Load, gamma: Floats) -> Floats:
    """Seconds that the receiver of each message spends on summing it."""
    return np.where(load.reduce, load.nbytes * gamma[load.dst], 0.0)


def _in_turn(ports: Ints, begin: Floats, work: Floats) -> tuple[Floats, Ints]:
    """The time each message is through if every port serves one at a time, in order of readiness; and the head.

    finish[j] = max over i <= j of begin[i] + work[i] + .. + work[j], within each port, by doubling distances; the
    head is that i.
    """
    own = np.where(ports >= 0, ports, -1 - np.arange(len(ports)))  # no port to share: alone
    order = np.lexsort((_turns(begin), own))
    sorted_ports, total = own[order], np.cumsum(work[order])
    slack, first = begin[order] - (total - work[order]), np.arange(len(order))
    position = first - np.searchsorted(sorted_ports, sorted_ports)
    distance, longest = 1, int(position.max(initial=0))
    while distance <= longest:
        behind: Ints = np.flatnonzero(position >= distance)
        earlier = slack[behind - distance] > slack[behind]
        first[behind] = np.where(earlier, first[behind - distance], first[behind])
        slack[behind] = np.where(earlier, slack[behind - distance], slack[behind])
        distance *= 2
    finish, head = np.empty_like(begin), np.empty_like(order)
    finish[order], head[order] = slack + total, order[first]
    return finish, head


def _turns(begin: Floats) -> Ints:
    """Small integers in the order of the times; the same for times that differ by rounding only."""
    order = np.argsort(begin, kind="stable")
    turns = np.empty_like(order)
    turns[order] = np.cumsum(np.diff(begin[order], prepend=begin[order[:1]]) > _ALIKE * begin[order])
    return turns


@dataclass(frozen=True)
class Setting:
    """The input of a simulation: a schedule on a topology with so many bytes, counted as Collective.chunk_nbytes says.

    Every chunk is cut into `chunks` pieces. `eager`: alpha is time on the wire.

    Raises UsageError if the topology has another number of ranks, or a number is out of range.
    """

    schedule: Schedule
    topology: Topology
    nbytes: float
    chunks: int
    eager: bool

    def __post_init__(self) -> None:
        ranks = self.schedule.world_size
        if self.topology.world_size != ranks:
            raise UsageError(
                f"{self.schedule.name} is for {ranks} ranks, but topology {self.topology.name} has "
                f"{self.topology.world_size}: build one for the other"
            )
        if not self.nbytes >= 0 or self.chunks < 1:
            raise UsageError(
                f"simulate needs nbytes of at least 0 and at least 1 chunk, got {self.nbytes} and {self.chunks}"
            )


class Observer(Protocol):
    """Somebody who watches the messages go by, as long as there are not too many."""

    def wants(self, messages: int) -> bool:
        """True if so many more messages are shown one slot at a time; if not, they pass in leaps, unseen."""

    def see(self, parts: tuple[Part, ...], load: Load, times: Times) -> None:
        """One slot has passed."""


def play(setting: Setting, observer: Observer) -> Clock:
    """A clock that has run from zero to the end."""
    schedule, topology = setting.schedule, setting.topology
    clock = Clock(topology, schedule.switches, setting.eager)
    for slot in slots(schedule, setting.chunks):
        load = load_of(slot, schedule, topology, setting.nbytes, setting.chunks)
        if slot.repeat > 1 and not observer.wants(len(load) * slot.repeat):
            clock.advance_alike(load, slot.repeat)
        elif len(load):
            for i in range(slot.repeat):
                observer.see(slot.at(i), load, clock.advance(load))
    return clock
