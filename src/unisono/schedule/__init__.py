"""Schedules as data: collectives, transfers, steps, pipelines, topology, text form. Never imports torch."""

from unisono.schedule.collectives import COLLECTIVES, Collective
from unisono.schedule.model import LazySteps, Schedule, Step, Transfer
from unisono.schedule.pipeline import Action, PipelineSchedule
from unisono.schedule.redistribution import Redistribution
from unisono.schedule.topology import LINKS, PRESETS, Link, Topology, cluster, preset

__all__ = [
    "COLLECTIVES",
    "LINKS",
    "PRESETS",
    "Action",
    "Collective",
    "LazySteps",
    "Link",
    "PipelineSchedule",
    "Redistribution",
    "Schedule",
    "Step",
    "Topology",
    "Transfer",
    "cluster",
    "preset",
]
