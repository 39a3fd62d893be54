"""Helpers of commands about schedules: its name on the command line, and its source."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.algorithms import algorithm_info, build, names
from unisono.algorithms.pipelines import PIPELINE, SCHEDULES, build_pipeline
from unisono.cli.common import read_source, source_name
from unisono.cli.options import COLLECTIVE, MICROBATCHES, RANKS
from unisono.cli.programs import Placed, find_default, place_default, place_over_hosts
from unisono.errors import UsageError
from unisono.program import Program
from unisono.schedule import (
    LINKS,
    PRESETS,
    Hosts,
    PipelineSchedule,
    Schedule,
    Topology,
    as_hosts,
    cluster,
    joined,
    preset,
    show_hosts,
)
from unisono.schedule.text import read_schedule
from unisono.schedule.topology_file import MEASURED, load_topology
from unisono.selection import BY_DEFAULT
from unisono.simulation import PipelineCosts

__all__ = [
    "Asked",
    "find_on",
    "pipeline_costs",
    "refuse",
    "topology_of",
]


_LARGEST_HOST = 8


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raises UsageError for the first option that is given."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} {why}")


@dataclass(frozen=True)
class Asked:
    """A schedule as a command line names it; None for what is not given."""

    source: str
    collective: str | None = None
    ranks: int | None = None
    root: int | None = None
    chunks: int | None = None
    microbatches: int | None = None
    per_rank: int | None = None
    hosts: str | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return RANKS if self.ranks is None else self.ranks

    @property
    def is_name(self) -> bool:
        """True if the source is an algorithm, a pipeline schedule, or the default, rather than a file."""
        return self.source in (BY_DEFAULT, *names(), *SCHEDULES)

    @property
    def _of_pipelines(self) -> dict[str, object]:
        return {"--microbatches": self.microbatches, "--per-rank": self.per_rank}

    def find(self) -> Schedule | PipelineSchedule:
        """The schedule of that name, or the one in a file (`-`: standard input) in its text form or JSON.

        Raises UsageError if there is no such name or file, if its content is no schedule, or if it comes together with
        arguments that it does not have.
        """
        if not self.is_name:
            return self.parse(self.read())
        if self.source not in SCHEDULES:
            refuse(self._of_pipelines, f"is of pipelines, and {self.source} is an algorithm: leave it out")
            return self._build(self.collective or COLLECTIVE, 1 if self.chunks is None else self.chunks)
        others = {"--root": self.root, "--chunks": self.chunks, "--hosts": self.hosts}
        refuse(others, f"is of collectives, and {self.source} is a pipeline schedule: leave it out")
        if self.collective not in (None, PIPELINE):
            raise UsageError(f"{self.source} is a pipeline schedule: leave {self.collective} out")
        microbatches = MICROBATCHES if self.microbatches is None else self.microbatches
        return build_pipeline(self.source, self.world_size, microbatches, self.per_rank)

    def _build(self, collective: str, chunks: int) -> Schedule:
        """The algorithm of that name, for the hosts if it knows any."""
        if self.hosts is not None:
            as_hosts(self.hosts, self.world_size)
        knows = self.hosts is not None and "hosts" in algorithm_info(self.source, collective).options
        options = {"hosts": self.hosts} if knows else {}
        return build(self.source, collective, self.world_size, self.root or 0, chunks, **options)

    def find_sized(self, nbytes: int) -> Schedule | PipelineSchedule:
        """As `find`; ``default`` is the schedule that runs for this size."""
        return self.find_placed(nbytes)[0].schedule if self.source == BY_DEFAULT else self.find()

    def find_placed(self, nbytes: int) -> list[Placed]:
        """The schedule of a collective as the backend places it; ``default`` is the one for this size.

        For ``default``, what runs between shared tensors comes after it. Raises UsageError as `find` does, if
        ``default`` comes with a number of chunks, and for the schedule of a pipeline.
        """
        if self.source != BY_DEFAULT:
            found = self.find()
            if isinstance(found, PipelineSchedule):
                raise UsageError(f"{found.name} is a pipeline schedule, which has no programs")
            return [Placed(found, hosts=self.cut(found.world_size))]
        refuse(self._of_pipelines, "is of pipelines: leave it out")
        if self.chunks is not None:
            raise UsageError("the table of defaults has its own number of chunks: leave --chunks out")
        if len(hosts := self.cut(self.world_size)) > 1:
            return [place_over_hosts(self.collective or COLLECTIVE, nbytes, hosts, self.root or 0)]
        row = find_default(self.collective or COLLECTIVE, nbytes, self.world_size)
        return place_default(row, nbytes, self.world_size, self.root or 0)

    def cut(self, ranks: int) -> Hosts:
        """The ranks of each host, if hosts are given."""
        return as_hosts(self.hosts, ranks) if self.hosts is not None else ()

    def read(self) -> str:
        """The content of a file, or standard input. Raises UsageError as `find` does."""
        if self.source != "-" and not Path(self.source).exists():
            raise UsageError(
                f"no algorithm and no file is called {self.source!r}: the algorithms are {', '.join(names())}; of "
                f"pipelines {', '.join(SCHEDULES)}; a file holds a schedule as `unisono draw ring --text` prints it"
            )
        given: dict[str, object] = {
            "COLLECTIVE": self.collective,
            "--ranks": self.ranks,
            "--root": self.root,
            "--chunks": self.chunks,
        }
        called = source_name(self.source)
        for name, value in (given | self._of_pipelines).items():
            if value is not None:
                raise UsageError(f"the schedule in {called} has its own collective and numbers: leave {name} out")
        return read_source(self.source)

    def parse(self, content: str) -> Schedule | PipelineSchedule:
        """The schedule that the content of a file describes. Raises UsageError that names the file."""
        try:
            return read_schedule(content)
        except UsageError as problem:
            raise UsageError(f"{source_name(self.source)}: {problem}") from None

    def parse_programs(self, content: str) -> list[Program]:
        """The programs in a text, each after a line that begins with ``program``. Raises UsageError as `parse` does."""
        texts = [f"program {text}" for text in re.split(r"^program\s", content, flags=re.MULTILINE)[1:]]
        try:
            return [Program.from_text(text) for text in texts]
        except UsageError as problem:
            raise UsageError(f"{source_name(self.source)}: {problem}") from None


def find_on(
    asked: Sequence[Asked], topology: str | None, hosts: str | None, nbytes: int
) -> tuple[list[Schedule | PipelineSchedule], Topology]:
    """The schedules, algorithms built for the hosts of the topology, and the topology, by default as many ranks need.

    ``nbytes``: of the default. Raises UsageError as `Asked.find` and `topology_of` do.
    """
    first = asked[0]
    ranks, known = first.ranks, topology is not None and topology not in PRESETS
    if not first.is_name or first.source in SCHEDULES:
        found = [each.find_sized(nbytes) for each in asked]
        ranks = found[0].world_size
    elif ranks is None and not known:
        ranks = RANKS
    if ranks is not None and ranks < 1:
        raise UsageError(f"{first.source}: world_size must be at least 1, got {ranks}")
    usual = "nvlink" if hosts is None and ranks is not None and ranks <= _LARGEST_HOST else "cluster"
    where = topology_of(topology or usual, ranks, hosts)
    cut = show_hosts(where.ranks_of_hosts) if where.hosts > 1 else None
    if first.is_name and first.source not in SCHEDULES:
        ranks = where.world_size
        placed = [replace(each, ranks=ranks, hosts=cut) for each in asked]
        found = [each.find_sized(nbytes) for each in placed]
    return found, where


def pipeline_costs(schedule: PipelineSchedule, times: str | None, link: float | None) -> PipelineCosts:
    """Costs from --times and --link; the stages of a rank take equal parts. Raises UsageError if they are no times."""
    try:
        forward, input_gradient, weight_gradient = (float(time) for time in (times or "1,1,1").split(","))
    except ValueError:
        raise UsageError(f"--times is {times!r}, expected three numbers such as 1,1,1") from None
    each = schedule.num_stages / max(schedule.world_size, 1)
    return PipelineCosts(forward / each, input_gradient / each, weight_gradient / each, link or 0.0)


def topology_of(name: str, ranks: int | None, hosts: str | None) -> Topology:
    """A topology by name, in a file, or as measured; a preset over hosts, joined by ethernet, or of a cluster.

    Raises UsageError if there is none of that name, or what is given does not go together.
    """
    if name == MEASURED or (name not in PRESETS and Path(name).exists()):
        found = load_topology(None if name == MEASURED else Path(name))
        refuse({"--hosts": hosts}, f"is known to the topology {name}: leave it out")
        if ranks not in (None, found.world_size):
            raise UsageError(f"the topology {name} has {found.world_size} ranks, not {ranks}")
        return found
    if name not in PRESETS:
        raise UsageError(f"unknown topology {name!r}: expected one of {', '.join(PRESETS)}, {MEASURED}, or a file")
    ranks = RANKS if ranks is None else ranks
    if hosts is None:
        return preset(name, ranks)
    cut = as_hosts(hosts, ranks)
    if cut == as_hosts(len(cut), len(cut) * len(cut[0])) and name == "cluster":
        return cluster(len(cut), len(cut[0]))
    inside, far = ("nvlink", "infiniband") if name == "cluster" else (name, "ethernet")
    where = preset(inside, ranks)
    return joined(cut, where.intra, ((LINKS[far],) * len(cut),) * len(cut), where.gamma, name=name)
