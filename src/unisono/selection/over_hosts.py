"""The schedule of a call in a group that spans hosts: by size, from the group's own topology, alike on all ranks.

A step costs what its slowest part does: the busiest link between hosts, or what the busiest host moves inside, for the
two overlap. Between hosts that is alpha, beta for every byte that one host sends or receives, and what every further
message costs; inside, a meeting and every byte that is staged and read, or alpha and beta of the inner link. Shares of
bytes are counted on the schedule once; a size then takes a few multiplications.

Where something is summed, only leaders and columns are candidates. Up to 256 runs of ranks they add by runs in rank
order (algorithms/cut.py), at every size alike, so that an element's bits depend on no size and place. Of candidates
that cost alike, to a percent or a tenth of alpha, the one with the fewest messages is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms import build
from unisono.errors import UsageError, check_known
from unisono.schedule import COLLECTIVES, Schedule, Step, Topology

__all__ = ["OverHosts", "over_hosts"]

_PIECES = (1, 2, 4, 8, 16, 32)
_SMALLEST_PIECE = 1 << 19  # bytes
_ALIKE = 1.01
_FLAT = {"all_gather": "direct", "all_to_all": "direct", "broadcast": "star", "gather": "star", "scatter": "star"}


@dataclass(frozen=True)
class OverHosts:
    """A registered algorithm, pieces per block, and the seconds that it takes by the model."""

    algorithm: str
    collective: str
    chunks: int
    seconds: float
    topology: Topology

    def build(self, root: int = 0) -> Schedule:
        """The schedule."""
        return _built(self.algorithm, self.collective, self.topology, root, self.chunks)


def over_hosts(collective: str, nbytes: float, topology: Topology, root: int = 0) -> OverHosts:
    """The fastest schedule that keeps the order of sums.

    Args:
        collective: its name.
        nbytes: as `unisono.program.default` counts: of the tensor for all_reduce, reduce and broadcast, else of one
            rank's piece, the longest of all.
        topology: the group's.
        root: of a broadcast, reduce, gather or scatter.

    Raises:
        UsageError: there is no such collective, or the topology has one host.

    """
    check_known("collective", collective, COLLECTIVES)
    if topology.hosts == 1:
        raise UsageError(f"topology {topology.name} has one host: the defaults serve it")
    quotes = []
    for name, chunks in _candidates(collective, nbytes):
        costs = _costs(name, collective, topology, root, chunks)
        quotes.append(OverHosts(name, collective, chunks, costs.seconds(nbytes), topology))
    slack = topology.inter.alpha / 10 if topology.inter is not None else 0.0
    best = min(quote.seconds for quote in quotes)
    return next(quote for quote in quotes if quote.seconds <= best * _ALIKE + slack)


def _candidates(collective: str, nbytes: float) -> Iterator[tuple[str, int]]:
    yield "leaders", 1
    if collective in _FLAT:
        yield _FLAT[collective], 1
    if collective == "all_to_all":
        yield "columns", 1
    elif collective not in ("gather", "scatter", "barrier"):
        for chunks in _PIECES:
            if chunks == 1 or nbytes >= chunks * _SMALLEST_PIECE:
                yield "columns", chunks


@dataclass(frozen=True)
class StepCosts:
    """Seconds of every step without bytes, and per byte of a chunk, between hosts and inside: float64, shape (steps,).

    ``per_chunk``: chunks' bytes per byte of the call.
    """

    far: NDArray[np.float64]
    far_per_byte: NDArray[np.float64]
    near: NDArray[np.float64]
    near_per_byte: NDArray[np.float64]
    per_chunk: float

    def seconds(self, nbytes: float) -> float:
        """Of all steps."""
        chunk = nbytes * self.per_chunk
        return float(np.maximum(self.far + self.far_per_byte * chunk, self.near + self.near_per_byte * chunk).sum())


def _step_costs(schedule: Schedule, topology: Topology) -> StepCosts:
    """The costs of a schedule's steps on a topology; sizes as in `over_hosts`."""
    c = schedule.collective
    rows = [(*_between(step, topology), *_inside(step, topology)) for step in schedule.explicit_steps()]
    far, far_per_byte, near, near_per_byte = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return StepCosts(far, far_per_byte, near, near_per_byte, 0.0 if c.name == "barrier" else 1.0 / c.pieces)


def _between(step: Step, topology: Topology) -> tuple[float, float]:
    """alpha of the slowest message, and seconds per byte of a chunk on the busiest side of any host."""
    there = topology.outside(step.src, step.dst)
    src, dst, count = step.src[there], step.dst[there], step.count[there]
    if not len(src):
        return 0.0, 0.0
    work, alpha = count * topology.beta(src, dst), topology.alpha(src, dst)
    sides = [np.bincount(topology.host(ranks), weights=work, minlength=topology.hosts).max() for ranks in (src, dst)]
    pairs = np.unique(np.stack([src, dst]), axis=1)
    busiest = max(int(np.bincount(ranks).max()) for ranks in pairs)
    cores = topology.memory.cores if topology.memory is not None else topology.ranks_per_host
    hosts = max(int(np.bincount(topology.host(ranks)).max()) for ranks in pairs)
    slowest = topology.link(int(src[alpha.argmax()]), int(dst[alpha.argmax()]))
    further = max(busiest, -(-hosts // cores)) - 1
    return slowest.alpha + further * slowest.further, float(max(sides)) / topology.nics


def _inside(step: Step, topology: Topology) -> tuple[float, float]:
    """The meeting, or the inner link's alpha, and seconds per byte of a chunk that the busiest host or rank takes."""
    there = ~topology.outside(step.src, step.dst)
    src, dst, count, reduce = (column[there] for column in (step.src, step.dst, step.count, step.reduce))
    if not len(src):
        return 0.0, 0.0
    n, memory = topology.world_size, topology.memory
    if memory is None:
        ports = max(float(np.bincount(ranks, weights=count, minlength=n).max()) for ranks in (src, dst))
        return topology.intra.alpha, ports * topology.intra.beta
    pairs = np.unique(np.stack([src, step.chunk[there], count]), axis=1)  # what several read is staged once
    staged = np.bincount(pairs[0], weights=pairs[2], minlength=n) * memory.copy
    read = np.bincount(dst, weights=count * (memory.copy + reduce * topology.gamma), minlength=n)
    busy = staged + read
    shared = np.bincount(topology.host(np.arange(n)), weights=busy, minlength=topology.hosts) / memory.cores
    return memory.meeting, float(max(busy.max(), shared.max()))


@lru_cache(maxsize=256)
def _costs(name: str, collective: str, topology: Topology, root: int, chunks: int) -> StepCosts:
    return _step_costs(_built(name, collective, topology, root, chunks), topology)


def _built(name: str, collective: str, topology: Topology, root: int, chunks: int) -> Schedule:
    options: dict[str, object] = {} if name in _FLAT.values() else {"hosts": topology.ranks_of_hosts}
    return build(name, collective, topology.world_size, root, chunks, **options)
