"""The result of simulate: when every rank starts and ends, what every link carried, and every event of a small run."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.simulation.clock import Setting, play
from unisono.simulation.path import CriticalPath, critical_path
from unisono.simulation.recording import EVENT_LIMIT, EventLog, Events, Traffic, traffic_of
from unisono.units import show_nbytes, show_seconds

__all__ = ["Timeline", "bus_factor", "simulate_collective"]


@dataclass(frozen=True, repr=False)
class Timeline(Setting):
    """One simulated run, with what was simulated; times in seconds.

    start, end: float64, shape (world_size,): when each rank's first message starts and its last step ends (0 and 0 for
    a rank that takes part in nothing).
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    events_or_none: Events | None

    @property
    def time(self) -> float:
        """Seconds until the last rank is done."""
        return float(self.end.max(initial=0.0))

    @property
    def algbw(self) -> float:
        """Bytes per second: nbytes / time (0 if there was nothing to do)."""
        return self.nbytes / self.time if self.time else 0.0

    @property
    def busbw(self) -> float:
        """algbw times the factor of NCCL's tests, which makes it comparable to the speed of a link."""
        return self.algbw * bus_factor(self.schedule.collective.name, self.schedule.world_size)

    @property
    def events(self) -> Events:
        """Every transfer. Raises UsageError for more than EVENT_LIMIT of them, which no rank could draw."""
        if self.events_or_none is None:
            raise UsageError(
                f"{self.schedule.name} over {self.schedule.world_size} ranks makes {self.traffic.num_messages} "
                f"transfers, events are kept up to {EVENT_LIMIT}: simulate fewer ranks or chunks"
            )
        return self.events_or_none

    @cached_property
    def path(self) -> CriticalPath:
        """The chain of messages that decides the time; the schedule is played once more to find it."""
        return critical_path(self)

    @cached_property
    def traffic(self) -> Traffic:
        """What went over each link."""
        return traffic_of(self.schedule, self.nbytes, self.chunks)

    def __repr__(self) -> str:
        s = self.schedule
        size = "" if s.collective.name == "barrier" else f" of {show_nbytes(self.nbytes)}"
        took = f"{show_seconds(self.time)} over {self.topology.name}"
        return f"<{s.name} {s.collective.name}{size}: {s.world_size} ranks, {took}>"

    def critical_path(self, limit: int = 40) -> list[str]:
        """That chain in words, first message first, at most the last `limit` of them."""
        return self.path.lines(limit)


def simulate_collective(setting: Setting) -> Timeline:
    """Play a schedule on a topology."""
    events, n = EventLog(), setting.schedule.world_size
    clock = play(setting, events)
    start = np.where(np.isfinite(clock.first[:n]), clock.first[:n], 0.0)
    return Timeline(**vars(setting), start=start, end=clock.ready[:n].copy(), events_or_none=events.events())


def bus_factor(collective: str, world_size: int) -> float:
    """busbw / algbw as in nccl-tests, comparable with the rate of a link; 0 for a barrier, which moves nothing."""
    shares = {"broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0, "redistribution": 1.0, "barrier": 0.0}
    share = shares.get(collective, (world_size - 1) / world_size)
    return 2 * share if collective == "all_reduce" else share
