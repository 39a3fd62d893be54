"""Schedules as data: collectives, transfers, steps, topology, text form. Never imports torch."""

from unisono.schedule.collectives import COLLECTIVES, Collective
from unisono.schedule.model import LazySteps, Schedule, Step, Transfer
from unisono.schedule.topology import LINKS, PRESETS, Link, Topology, cluster, preset

__all__ = [
    "COLLECTIVES",
    "LINKS",
    "PRESETS",
    "Collective",
    "LazySteps",
    "Link",
    "Schedule",
    "Step",
    "Topology",
    "Transfer",
    "cluster",
    "preset",
]
