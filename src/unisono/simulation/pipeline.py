"""Predict a pipeline schedule: who is busy when, how long every rank is idle, what every rank must keep in memory.

Every rank works through its row, waits for what an action needs, and sends each result as soon as the action ends; a
message takes `link` and keeps no rank busy. Times are in any unit, as long as it is one. Never imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.schedule.pipeline import Action, PipelineSchedule
from unisono.verification import verify

__all__ = ["PipelineCosts", "PipelineReport", "PipelineTimeline", "Slot", "simulate_pipeline"]


@dataclass(frozen=True)
class PipelineCosts:
    """Times of one stage for one microbatch, a number for all stages or one for each, and of one message.

    forward, input_gradient and weight_gradient are t_F, t_B and t_W; BW takes the sum of the last two.
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    link: float = 0.0

    def check(self, num_stages: int) -> None:
        """Raises UsageError for times below zero, and where there is not one for every stage."""
        for name, value in vars(self).items():
            times = [value] if isinstance(value, int | float) else list(value)
            if not isinstance(value, int | float) and len(times) != num_stages:
                raise UsageError(f"{name} has {len(times)} times: expected one for all stages or {num_stages}")
            if any(not 0 <= time < float("inf") for time in times):
                raise UsageError(f"{name} must not be below zero, got {value}")

    def of(self, action: Action) -> float:
        """The duration of an action."""
        kinds = {"F": self.forward, "B": self.input_gradient, "W": self.weight_gradient}
        values = [kinds[part.kind] for part in action.parts]
        return sum(value if isinstance(value, int | float) else value[action.stage] for value in values)


class Slot(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class PipelineTimeline:
    """The timeline, predicted or measured: `slots[rank]` in order, in seconds or in the unit of the costs."""

    schedule: PipelineSchedule
    slots: tuple[tuple[Slot, ...], ...]

    @cached_property
    def time(self) -> float:
        """From the first start of any rank to the last end."""
        ends = [row[-1].end for row in self.slots if row]
        return max(ends) - min(row[0].start for row in self.slots if row) if ends else 0.0

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time each rank works."""
        return tuple(sum(slot.end - slot.start for slot in row) for row in self.slots)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """The time from each rank's own first start to its own last end."""
        return tuple(row[-1].end - row[0].start if row else 0.0 for row in self.slots)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The share of its own span that each rank is idle."""
        return tuple(max(0.0, 1 - b / s) if s else 0.0 for b, s in zip(self.busy, self.spans, strict=True))

    @property
    def bubble(self) -> float:
        """The bubble as the literature has it: of the rank with the longest span, the share of it that is idle.

        Ranks start and end at different times, and a rank's next step begins when its own last has ended; so a rank
        is charged for the waits within its own span alone.
        """
        longest = max(range(len(self.spans)), key=lambda rank: self.spans[rank], default=None)
        return 0.0 if longest is None else self.bubbles[longest]

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """The most microbatches each rank holds at once, from their F to their W, through all of its stages.

        A microbatch in one of the v stages of a rank counts as 1/v, so that it is a measure of memory.
        """
        peaks = []
        for rank, row in enumerate(self.schedule.actions):
            held = peak = 0
            for action in row:
                held += action.kind == "F"
                peak = max(peak, held)
                held -= action.kind in ("W", "BW")
            peaks.append(peak / max(len(self.schedule.stages_of(rank)), 1))
        return tuple(peaks)

    @cached_property
    def num_messages(self) -> int:
        """Messages between ranks, in both directions."""
        ranks, last = self.schedule.ranks, self.schedule.num_stages - 1
        borders = sum(ranks.get(stage) != ranks.get(stage + 1) for stage in range(last))
        return 2 * borders * self.schedule.num_microbatches

    def __repr__(self) -> str:
        s = self.schedule
        return f"<{s.name} pipeline: {s.world_size} ranks, time {self.time:g}, bubble {self.bubble:.1%}>"


def simulate_pipeline(schedule: PipelineSchedule, costs: PipelineCosts | None = None) -> PipelineTimeline:
    """The times of all actions, starting at 0. Raises ScheduleError for a wrong schedule, UsageError for costs."""
    costs = costs or PipelineCosts()
    costs.check(schedule.num_stages)
    verify(schedule).raise_if_bad()
    ends: dict[Action, tuple[float, int]] = {}
    slots: list[list[Slot]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.world_size
    left = sum(map(len, schedule.actions))
    while left:
        for rank, row in enumerate(schedule.actions):
            while len(slots[rank]) < len(row):
                action = row[len(slots[rank])]
                needs = action.needs(schedule.num_stages)
                if any(need not in ends for need in needs):
                    break
                arrivals = (ends[need][0] + (costs.link if ends[need][1] != rank else 0.0) for need in needs)
                start = max(free[rank], *arrivals) if needs else free[rank]
                free[rank] = start + costs.of(action)
                ends.update(dict.fromkeys(action.parts, (free[rank], rank)))
                slots[rank].append(Slot(action, start, free[rank]))
                left -= 1
    return PipelineTimeline(schedule, tuple(map(tuple, slots)))


@dataclass(frozen=True)
class PipelineReport:
    """Two timelines of the same step in seconds: as it was, and as its own mean times of F, B and W predict it."""

    measured: PipelineTimeline
    predicted: PipelineTimeline

    @classmethod
    def of(cls, schedule: PipelineSchedule, slots: Sequence[Sequence[Slot]]) -> "PipelineReport":
        """From what every rank measured; times are seconds since any moment, the same for all ranks of a host."""
        measured = PipelineTimeline(schedule, tuple(map(tuple, slots)))
        return cls(measured, simulate_pipeline(schedule, _mean_costs(measured)))

    def __str__(self) -> str:
        measured, predicted = self.measured, self.predicted
        lines = [
            f"{measured.schedule.name}: bubble {measured.bubble:.1%}, predicted {predicted.bubble:.1%} from what each "
            "stage takes and free links",
            "rank  busy ms  idle  predicted",
        ]
        for rank, busy in enumerate(measured.busy):
            idle, foreseen = measured.bubbles[rank], predicted.bubbles[rank]
            lines.append(f"{rank:4}  {busy * 1e3:7.1f}  {idle:4.0%}  {foreseen:9.0%}")
        return "\n".join(lines)


def _mean_costs(line: PipelineTimeline) -> PipelineCosts:
    """The mean time of each kind of action in each stage; that of BW counts as half B, half W."""
    totals: dict[tuple[int, str], tuple[float, int]] = {}
    for slot in (slot for row in line.slots for slot in row):
        parts = slot.action.parts
        for part in parts:
            time, count = totals.get((part.stage, part.kind), (0.0, 0))
            totals[part.stage, part.kind] = (time + (slot.end - slot.start) / len(parts), count + 1)
    means = {key: time / count for key, (time, count) in totals.items()}
    stages = range(line.schedule.num_stages)
    forward, input_gradient, weight_gradient = ([means.get((s, kind), 0.0) for s in stages] for kind in "FBW")
    return PipelineCosts(forward, input_gradient, weight_gradient)
