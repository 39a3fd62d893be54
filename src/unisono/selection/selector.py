"""Select: the best algorithm for a collective, a size and a topology, and why.

Every algorithm that can run is built and simulated; those that pipeline, with as many pieces as pay off. If this
machine has been measured (selection/measured.py), what was measured decides instead. The choice depends on nothing but
its arguments, which are the same on all ranks.

The time of a schedule is the longest of many chains of messages, each a straight line over the bytes: a convex curve of
straight pieces. A third point on the line between two others thus proves the whole piece straight, and a few
simulations tell the time for all sizes.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import log2

from unisono.algorithms import AlgorithmInfo, build, list_algorithms
from unisono.errors import UsageError, check_known
from unisono.schedule import COLLECTIVES, Schedule, Topology, preset
from unisono.selection.measured import Measured
from unisono.simulation import bus_factor, simulate
from unisono.units import as_nbytes, show_nbytes, show_seconds

__all__ = ["SIZES", "Choice", "Crossover", "Quote", "Selector", "select"]

SIZES = tuple(4**i for i in range(1, 16))  # 4 B to 1 GiB

_MOST_PIECES = 128
_MOST_WORK = 1 << 20  # transfers, or as much as takes as long: a second or two
_SLOT_WORK = 300  # transfers that take as long as a step does by itself
_SAME = 1e-6
_STRAIGHT = 1e-5  # how far from a straight line a time may be, relatively


@dataclass(frozen=True)
class Candidate:
    """An algorithm with its options, as it suits a topology."""

    algorithm: AlgorithmInfo
    options: tuple[tuple[str, object], ...] = ()

    @property
    def label(self) -> str:
        """Name and options that are names, e.g. `hierarchical direct+double_tree`: the one inside, the one between."""
        parts = [value for _, value in self.options if isinstance(value, str)]
        return f"{self.algorithm.name} {'+'.join(parts)}" if parts else self.algorithm.name

    def build(self, world_size: int, root: int, chunks: int) -> Schedule:
        """Its schedule."""
        a = self.algorithm
        return build(a.name, a.collective, world_size, root, chunks, **dict(self.options))


@dataclass(frozen=True)
class Quote:
    """The cost of one algorithm: `seconds` for the size asked, built with `chunks` pieces; measured or modelled."""

    candidate: Candidate
    chunks: int
    seconds: float
    measured: bool = False

    @property
    def label(self) -> str:
        """The algorithm, and the number of pieces if it is more than one."""
        return self.candidate.label + (f" in {self.chunks} pieces" if self.chunks > 1 else "")


@dataclass(frozen=True, repr=False)
class Choice:
    """The quotes for one size, best first; `left_out` says why other algorithms were not considered."""

    collective: str
    nbytes: float
    topology: Topology
    quotes: tuple[Quote, ...]
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def best(self) -> Quote:
        """The fastest."""
        return self.quotes[0]

    @property
    def busbw(self) -> float:
        """Bytes per second of the best, as NCCL's tests define it."""
        factor = bus_factor(self.collective, self.topology.world_size)
        return self.nbytes * factor / self.best.seconds if self.best.seconds else 0.0

    def __repr__(self) -> str:
        seconds = ", ".join(f"{quote.label} {show_seconds(quote.seconds)}" for quote in self.quotes[:3])
        return (
            f"<{self.collective} of {show_nbytes(self.nbytes)} over {self.topology.world_size} ranks: {seconds}, ...>"
        )

    def build(self, root: int = 0) -> Schedule:
        """The schedule of the best."""
        return self.schedule(self.best, root)

    def schedule(self, quote: Quote, root: int = 0) -> Schedule:
        """The schedule that a quote is for."""
        return quote.candidate.build(self.topology.world_size, root, quote.chunks)

    @cached_property
    def shares(self) -> dict[str, float]:
        """The parts of the best one's simulated time: seconds of start-up, bytes (waiting for ports too) and sums."""
        shares = simulate(self.build(), self.topology, self.nbytes).path.shares()
        return {
            "start-up": shares["alpha"],
            "bytes": shares["bytes"] + shares["queue"],
            "sums": shares["sum"],
        }


@dataclass(frozen=True)
class Crossover:
    """From `nbytes` bytes on, `above` is faster than `below` (labels of algorithms without their pieces)."""

    nbytes: float
    below: str
    above: str


def select(
    collective: str,
    nbytes: str | float = "1MiB",
    topology: str | Topology = "nvlink",
    world_size: int | None = None,
    measured: Measured | None = None,
) -> Choice:
    """The best algorithm for one size, and what the others cost.

    Args:
        collective: its name.
        nbytes: bytes, counted as in nccl-tests: 4096, "64KiB", "1MiB".
        topology: what joins the ranks, or its name, which needs `world_size`.
        world_size: number of ranks.
        measured: a table of this machine; if it knows the collective and number of ranks, it decides.

    Raises:
        UsageError: the collective or topology is unknown, or nothing does it.

    """
    if isinstance(topology, str):
        if world_size is None:
            raise UsageError(f"select over {topology} needs a number of ranks: give world_size")
        topology = preset(topology, world_size)
    elif world_size not in (None, topology.world_size):
        raise UsageError(f"topology {topology.name} has {topology.world_size} ranks, not {world_size}")
    return Selector(collective, topology, measured).choose(as_nbytes(nbytes))


class Selector:
    """Chooses for many sizes; schedules are built once."""

    def __init__(self, collective: str, topology: Topology, measured: Measured | None = None) -> None:
        check_known("collective", collective, COLLECTIVES)
        self.collective, self.topology = collective, topology
        table = measured or Measured()
        known = table.algorithms(collective, topology.world_size)
        self._table = table if known else None
        self._curves: dict[tuple[Candidate, int], _Curve] = {}
        self._left_out: dict[str, str] = {}
        self._candidates: list[Candidate] = []
        for e in list_algorithms(collective):
            if self._table is not None and e.name in known:
                self._candidates.append(Candidate(e))
            elif self._table is not None:
                self._left_out[e.name] = "not measured"
            elif e.simulation_only:
                self._left_out[e.name] = "needs a switch that sums"
            else:
                self._candidates += self._suited(e)
        if not self._candidates:
            why = "; ".join(f"{name} {why}" for name, why in self._left_out.items())
            raise UsageError(f"no algorithm to choose from for {collective}: {why}")

    def choose(self, nbytes: float) -> Choice:
        """All quotes for one size, best first; of equals, the one with fewer steps, then a shorter name."""
        if not nbytes >= 0:
            raise UsageError(f"the size must be at least 0 bytes, got {nbytes}")
        quotes = [self._quote(candidate, nbytes) for candidate in self._candidates]
        n = self.topology.world_size

        def order(quote: Quote) -> tuple[float, float, int, str]:
            e = quote.candidate.algorithm
            return float(f"{quote.seconds:.6g}"), e.steps(n, quote.chunks), len(quote.label), quote.label

        left_out = tuple(sorted(self._left_out.items()))
        return Choice(self.collective, nbytes, self.topology, tuple(sorted(quotes, key=order)), left_out)

    def table(self, sizes: Iterable[float] = SIZES) -> list[Choice]:
        """The choice for each size (one in all for a barrier, which has none)."""
        wanted = list(sizes) if self.collective != "barrier" else [0]
        made = {size: self.choose(size) for size in sorted(wanted, key=lambda size: min(wanted) < size < max(wanted))}
        return [made[size] for size in wanted]

    def crossovers(self, choices: Sequence[Choice]) -> list[Crossover]:
        """The sizes at which the best algorithm changes, to within a percent, between those of a table (ascending)."""
        found = []
        for low, high in pairwise(choices):
            here, below, top = low.nbytes, low.best, high.best.candidate
            while below.candidate != top:
                here, above = self._first_change(below.candidate, here, high.nbytes)
                found.append(Crossover(here, below.candidate.label, above.candidate.label))
                below = above
        return found

    def _first_change(self, best: Candidate, low: float, high: float) -> tuple[float, Quote]:
        """By bisection, a size in (low, high] from which `best` is not the best any more, and what is."""
        after = self.choose(high).best
        while high > low * 1.01 and high - low > 1:
            middle = (low * high) ** 0.5 if low else high / 2
            quote = self.choose(middle).best
            if quote.candidate == best:
                low = middle
            else:
                high, after = middle, quote
        return high, after

    def _quote(self, candidate: Candidate, nbytes: float) -> Quote:
        n, e = self.topology.world_size, candidate.algorithm
        if self._table is not None:
            return Quote(candidate, 1, self._table.seconds(self.collective, n, e.name, nbytes), True)
        best = Quote(candidate, 1, self._curve(candidate, 1).at(nbytes))
        chunks = 2 if e.steps(n, 1) != e.steps(n, 2) and nbytes else _MOST_PIECES + 1
        while chunks <= _MOST_PIECES and _work(self._curve(candidate, chunks).schedule) <= _MOST_WORK:
            quote = Quote(candidate, chunks, self._curve(candidate, chunks).at(nbytes))
            if quote.seconds >= best.seconds * (1 - _SAME):
                break
            best, chunks = quote, chunks * 2
        return best

    def _curve(self, candidate: Candidate, chunks: int) -> "_Curve":
        key = candidate, chunks
        if key not in self._curves:
            made = candidate.build(self.topology.world_size, 0, chunks)
            self._curves[key] = _Curve(made, self.topology)
        return self._curves[key]

    def _suited(self, e: AlgorithmInfo) -> list[Candidate]:
        """The algorithm as it suits the topology; notes why not, if it does not."""
        if (reason := _unsuited(e, self.topology)) is not None:
            self._left_out[e.name] = reason
            return []
        suited = []
        for candidate in _variants(e, self.topology):
            try:
                too_much = _work(self._curve(candidate, 1).schedule) > _MOST_WORK
            except UsageError as problem:
                self._left_out[candidate.label] = str(problem)
                continue
            if too_much:
                self._left_out[candidate.label] = "has too many messages to simulate"
            else:
                suited.append(candidate)
        return suited


class _Curve:
    """The simulated time of one schedule over its bytes, from a few simulations."""

    def __init__(self, schedule: Schedule, topology: Topology) -> None:
        self.schedule, self.topology = schedule, topology
        self._points: list[tuple[float, float]] = []
        self._straight: set[tuple[float, float]] = set()  # pieces, by the sizes at their ends

    def at(self, nbytes: float) -> float:
        i = bisect_left(self._points, (nbytes,))
        if i < len(self._points) and self._points[i][0] == nbytes:
            return self._points[i][1]
        if i in (0, len(self._points)):
            self._points.insert(i, (nbytes, self._simulated(nbytes)))
            return self._points[i][1]
        (a, before), (b, after) = self._points[i - 1 : i + 1]
        line = before + (after - before) * (nbytes - a) / (b - a)
        if (a, b) in self._straight:
            return line
        time = self._simulated(nbytes)
        # The gap under the line is concave, so it grows at most in proportion to the distance from either end.
        widest = min((nbytes - a) * (after - before), before * (b - nbytes)) / (b - a)
        if abs(line - time) <= _STRAIGHT * widest:
            self._straight.add((a, b))
        else:
            self._points.insert(i, (nbytes, time))
        return time

    def _simulated(self, nbytes: float) -> float:
        return simulate(self.schedule, self.topology, nbytes).time


def _unsuited(e: AlgorithmInfo, topology: Topology) -> str | None:
    if "hosts" in e.options and topology.hosts == 1:
        return "has one host to work on"
    if {"hosts", "intra"} <= set(e.options) and topology.ranks_per_host == 1:
        return "has one rank on every host"
    n = topology.world_size
    if n > 256 and _grown(e, n) > _MOST_WORK:
        return "has too many messages to simulate"
    return None


def _variants(e: AlgorithmInfo, topology: Topology) -> list[Candidate]:
    """Hosts as they are; for algorithms made of two, also direct inside, and trees or halving outside."""
    if "rows" in e.options and topology.hosts > 1 and topology.ranks_per_host > 1:
        return [Candidate(e, (("rows", topology.hosts),))]
    if "hosts" not in e.options:
        return [Candidate(e)]
    plain = Candidate(e, (("hosts", topology.cut or topology.hosts),))
    if "intra" not in e.options:
        return [plain]
    intra = ("ring", "direct") if e.collective not in ("broadcast", "reduce") else ("tree", "chain")
    inter = {"all_reduce": ("ring", "double_tree", "halving_doubling"), "broadcast": ("tree", "double_tree")}
    inter["reduce"] = inter["broadcast"]
    outer = inter.get(e.collective, ("ring", "halving_doubling"))
    return [replace(plain, options=(*plain.options, ("intra", i), ("inter", o))) for i in intra for o in outer]


def _grown(e: AlgorithmInfo, n: int) -> float:
    """Transfers to expect at n ranks, from how they grow between 32 and 64."""
    try:
        few, more = (sum(map(len, build(e.name, e.collective, ranks).steps)) for ranks in (32, 64))
    except UsageError:
        return 0.0
    return float(more * (n / 64) ** log2(max(more, 1) / max(few, 1)))


def _work(schedule: Schedule) -> float:
    """About how many transfers the simulator has to look at; long sequences of steps are sampled."""
    steps = schedule.steps
    count = len(steps)
    if not count:
        return 0.0
    looked_at = [steps[i * (count - 1) // 7] for i in range(8)]
    return count * (_SLOT_WORK + sum(map(len, looked_at)) / 8)
