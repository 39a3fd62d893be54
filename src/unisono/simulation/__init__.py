"""`simulate`: when every message of a schedule travels on a topology, at 8 or at 24,576 ranks; when every action of a
pipeline runs. Never imports torch.
"""

from typing import overload

from unisono.errors import UsageError
from unisono.schedule import PipelineSchedule, Schedule, Topology, preset
from unisono.simulation.clock import Setting
from unisono.simulation.memory import Effort, effort, fit_costs, fit_memory
from unisono.simulation.path import CriticalPath, Hop
from unisono.simulation.pipeline import PipelineCosts, PipelineReport, PipelineTimeline, Slot, simulate_pipeline
from unisono.simulation.programs import simulate_programs
from unisono.simulation.recording import EVENT_LIMIT, Events, Traffic
from unisono.simulation.tables import simulate_tables
from unisono.simulation.timeline import Timeline, bus_factor, simulate_collective
from unisono.units import as_nbytes

__all__ = [
    "EVENT_LIMIT",
    "CriticalPath",
    "Effort",
    "Events",
    "Hop",
    "PipelineCosts",
    "PipelineReport",
    "PipelineTimeline",
    "Slot",
    "Timeline",
    "Traffic",
    "bus_factor",
    "effort",
    "fit_costs",
    "fit_memory",
    "simulate",
    "simulate_programs",
    "simulate_tables",
]


@overload
def simulate(
    schedule: Schedule,
    topology: str | Topology = "nvlink",
    nbytes: str | float | None = None,
    chunks: int = 1,
    *,
    eager: bool = False,
) -> Timeline: ...


@overload
def simulate(schedule: PipelineSchedule, *, costs: PipelineCosts | None = None) -> PipelineTimeline: ...


def simulate(
    schedule: Schedule | PipelineSchedule,
    topology: str | Topology | None = None,
    nbytes: str | float | None = None,
    chunks: int = 1,
    *,
    eager: bool = False,
    costs: PipelineCosts | None = None,
) -> Timeline | PipelineTimeline:
    """The times of all events; of a collective by the alpha-beta-gamma model with contention for ports.

    Args:
        schedule: of a collective, also over switches, that `verify` approves; or of a pipeline.
        topology: a name (shared_memory, pcie, nvlink, infiniband, ethernet, cluster) or one with as many ranks.
        nbytes: the collective's bytes, counted as in nccl-tests (Collective.chunk_nbytes): 4096, "64KiB", "1MiB";
            by default those that a redistribution has, 1 MiB of any other.
        chunks: pieces that every chunk is cut into, one behind the other (simulation/slots.py). Schedules that are
            built in pieces already (chain, double tree) need no more.
        eager: alpha is time on the wire and keeps neither end busy. By default it does, as in textbooks' formulas.
        costs: of a pipeline: times of its stages and messages; one unit each by default.

    Raises:
        UsageError: the topology has another number of ranks, the schedule names ranks that do not exist, or a number
            is out of range.
        ScheduleError: the pipeline schedule is wrong.

    """
    if isinstance(schedule, PipelineSchedule):
        if topology is not None or nbytes is not None:
            raise UsageError(f"{schedule.name} is of a pipeline, which has no topology and bytes: give costs=")
        return simulate_pipeline(schedule, costs)
    if costs is not None:
        raise UsageError(f"{schedule.name} is of a collective, which has no costs: give topology= and nbytes=")
    where = preset("nvlink" if topology is None else topology, schedule.world_size)
    own = schedule.collective.own_nbytes
    size = as_nbytes(nbytes) if nbytes is not None else 1 << 20 if own is None else own
    return simulate_collective(Setting(schedule, where, size, chunks, eager))
