"""The progress of ranks that run a schedule with a bounded number of messages under way.

Each rank takes the steps in order; in a step it sends its messages, then receives. All transfers of a step to one peer
are one message. A send waits while `in_flight` messages of the rank are under way; a receive until its message is
there. With in_flight = 0 a send waits until its receiver takes it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unisono.schedule.model import Step

__all__ = ["Wait", "busiest_sender", "find_deadlock"]


@dataclass(frozen=True)
class Wait:
    """One rank that cannot go on: in `step` it waits to send to, or to receive from, `peer`; `on` must act first."""

    rank: int
    step: int
    sends: bool
    peer: int
    on: int

    def __str__(self) -> str:
        doing = f"sending to {self.peer}" if self.sends else f"receiving from {self.peer}"
        return f"rank {self.rank} in step {self.step}, {doing}, waits for rank {self.on}"


def busiest_sender(steps: Sequence[Step]) -> int:
    """The most messages that any rank sends in one step: with as many under way per rank, no rank waits for ever."""
    most = 0
    for step in steps:
        if len(step):
            pairs = np.unique(np.stack([step.src, step.dst]), axis=1)
            most = max(most, int(np.unique(pairs[0], return_counts=True)[1].max()))
    return most


def find_deadlock(steps: Sequence[Step], in_flight: int) -> list[Wait]:
    """Run until every rank is done or stuck: a cycle of waits, or an empty list if all came through."""
    run = _Run(steps, in_flight)
    moving = True
    while moving:
        moving = sum(run.advance(rank) for rank in run.programs) > 0
    stuck = {rank: run.wait(rank) for rank in run.programs if run.at[rank] < len(run.programs[rank])}
    if not stuck:
        return []
    seen: list[int] = []
    rank = min(stuck)
    while rank not in seen:
        seen.append(rank)
        rank = stuck[rank].on
    return [stuck[r] for r in seen[seen.index(rank) :]]


class _Run:
    """Programs are lists of (step, sends, peer) per rank; `at` counts what each rank has done."""

    def __init__(self, steps: Sequence[Step], in_flight: int) -> None:
        self.in_flight = in_flight
        self.programs: dict[int, list[tuple[int, bool, int]]] = {}
        for i, step in enumerate(steps):
            pairs = list(dict.fromkeys((t.src, t.dst) for t in step))
            for src, dst in pairs:
                self.programs.setdefault(src, []).append((i, True, dst))
            for src, dst in pairs:
                self.programs.setdefault(dst, []).append((i, False, src))
        self.at = dict.fromkeys(self.programs, 0)
        self.under_way: dict[int, list[int]] = {rank: [] for rank in self.programs}
        self.arrived: Counter[tuple[int, int]] = Counter()

    def _next(self, rank: int) -> tuple[int, bool, int] | None:
        done = self.at[rank]
        return self.programs[rank][done] if done < len(self.programs[rank]) else None

    def advance(self, rank: int) -> bool:
        """Do what the rank can do now; whether it did anything."""
        start = self.at[rank]
        while (op := self._next(rank)) is not None:
            _, sends, peer = op
            if sends and len(self.under_way[rank]) < self.in_flight:
                self.under_way[rank].append(peer)
                self.arrived[rank, peer] += 1
            elif not sends and self.arrived[peer, rank]:
                self.arrived[peer, rank] -= 1
                self.under_way[peer].remove(rank)
            elif not sends and self.in_flight == 0 and self._sends_to(peer, rank):
                self.at[peer] += 1
            else:
                break
            self.at[rank] += 1
        return self.at[rank] > start

    def _sends_to(self, rank: int, to: int) -> bool:
        op = self._next(rank)
        return op is not None and op[1] and op[2] == to

    def wait(self, rank: int) -> Wait:
        """The wait of a stuck rank."""
        step, sends, peer = self.programs[rank][self.at[rank]]
        held_up = self.under_way[rank] if sends else []
        return Wait(rank, step, sends, peer, held_up[0] if held_up else peer)
