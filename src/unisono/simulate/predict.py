"""simulate: from a schedule and a topology to a timeline."""

import numpy as np

from unisono.schedule import Schedule, Topology
from unisono.simulate.events import EventLog
from unisono.simulate.play import Setting, play
from unisono.simulate.timeline import Timeline
from unisono.simulate.traffic import TrafficLog

__all__ = ["simulate"]


def simulate(
    schedule: Schedule, topology: Topology, nbytes: float, chunks: int = 1, *, eager: bool = False
) -> Timeline:
    """When everything happens, by the alpha-beta-gamma model with contention for ports (rules: simulate.clock).

    Args:
        schedule: any schedule that verify approves; over switches, too.
        topology: one with as many ranks.
        nbytes: the collective's bytes, counted as in nccl-tests (Collective.chunk_nbytes).
        chunks: pieces that every chunk is cut into, one behind the other (simulate.slots). Schedules that are built in
            pieces already (chain, double tree) need no more.
        eager: alpha is time on the wire and keeps neither end busy. By default it does, as in textbooks' formulas.

    Raises:
        UsageError: the topology has another number of ranks, the schedule names ranks that do not exist, or a number
            is out of range.

    """
    setting = Setting(schedule, topology, nbytes, chunks, eager)
    clock, events, traffic = setting.clock(), EventLog(), TrafficLog(schedule.world_size + schedule.switches)
    play(setting, clock, [events, traffic])
    n = schedule.world_size
    start = np.where(np.isfinite(clock.first[:n]), clock.first[:n], 0.0)
    return Timeline(setting, start, clock.ready[:n].copy(), traffic.traffic(), events.events())
