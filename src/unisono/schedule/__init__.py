"""Schedules as data: collectives, transfers, steps, pipelines, topology, text form. Never imports torch."""

from unisono.schedule.collectives import COLLECTIVES, Collective, Redistribution
from unisono.schedule.hosts import Hosts, as_hosts, runs_of, show_hosts
from unisono.schedule.model import LazySteps, Schedule, Step, Transfer
from unisono.schedule.pipeline import Action, PipelineSchedule
from unisono.schedule.topology import LINKS, PRESETS, Link, Memory, Topology, cluster, joined, preset

__all__ = [
    "COLLECTIVES",
    "LINKS",
    "PRESETS",
    "Action",
    "Collective",
    "Hosts",
    "LazySteps",
    "Link",
    "Memory",
    "PipelineSchedule",
    "Redistribution",
    "Schedule",
    "Step",
    "Topology",
    "Transfer",
    "as_hosts",
    "cluster",
    "joined",
    "preset",
    "runs_of",
    "show_hosts",
]
