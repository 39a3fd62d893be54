"""One rank of the bench: the same walk over collectives, timings, sizes and contenders on every rank.

Timing is nccl-tests': after a barrier every rank makes a block of calls; a run is the mean time per call on the slowest
rank (clocks.py). Runs of the contenders take turns, so that what the machine does meanwhile hits all of them. Results
are checked before, on known inputs, outside the timed part.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

import unisono
from unisono.algorithms import build
from unisono.bench.cases import Case
from unisono.bench.clocks import Clock, HostClock, clock_of
from unisono.bench.machine import limit_of, measure_rates
from unisono.bench.mpi_calls import MpiCaller, mpi_caller
from unisono.bench.result import Rates, Row
from unisono.bench.settings import PERSISTENT, REDUCING, Contender, Settings
from unisono.bench.torch_calls import TorchCaller, torch_callers
from unisono.bench.values import Tables
from unisono.errors import first_line
from unisono.simulation import bus_factor

__all__ = ["Listener", "measure", "rank_main", "run_rank"]

Caller = TorchCaller | MpiCaller
Listener = Callable[[Rates | Row], None]
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_SETTLING = 0.1  # of the time that a collective takes
_SAMPLED = 30  # calls whose time is taken singly on every rank, to see how far the ranks are apart


def run_rank(settings: Settings, rank: int, init_method: str, report: Listener) -> None:
    """Join the job as ``rank``, measure, leave. ``report`` gets rates and rows, on rank 0 alone.

    A job with MPI in it needs the rank that mpiexec has given.
    """
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    if cores := settings.pins():
        os.sched_setaffinity(0, {cores[rank]})
    backends = dict.fromkeys(contender.backend for contender in settings.contenders)
    with ExitStack() as joined:
        callers: dict[str, Caller] = {}
        if settings.by_mpiexec:
            callers["mpi"] = joined.enter_context(mpi_caller(settings, rank))
        others = [name for name in backends if name != "mpi"]
        callers |= joined.enter_context(torch_callers(others, settings, rank, init_method))
        measure(settings, rank, callers, report)


def rank_main(rank: int, pipe: Connection, init_method: str, settings: Settings) -> None:
    """A rank that `launch` has started."""
    run_rank(settings, rank, init_method, pipe.send)
    pipe.close()
    os._exit(0)  # the backends' threads have nothing left to say


def measure(settings: Settings, rank: int, callers: Mapping[str, Caller], report: Listener) -> None:
    """Measure everything by ``callers``, one per backend. The first contender's also rules the walk; on GPUs unisono's,
    whose group has CPU tensors as well.

    A contender without a caller is shown as refused.
    """
    _Walk(settings, rank, callers, report if rank == 0 else lambda _: None).run()


@dataclass
class _Entrant:
    """A contender with its call; what is known of its pace so far."""

    contender: Contender
    call: Callable[[], Any]
    wrong: int | None = None
    refused: str = ""
    first: float = 0.0
    iterations: int = 1
    clock: Clock = field(default_factory=lambda: HostClock(lambda: None))


class _Walk:
    """The walk of one rank. Every decision rests on numbers that all ranks share."""

    def __init__(self, settings: Settings, rank: int, callers: Mapping[str, Caller], report: Listener) -> None:
        self.settings, self.rank, self.callers, self.report = settings, rank, callers, report
        self.on_gpu = settings.device == "cuda"
        self.ruling = callers["unisono" if self.on_gpu else settings.contenders[0].backend]
        self.tables = Tables(settings.ranks, getattr(torch, settings.dtype), settings.op, settings.device)
        self.rates = Rates()

    def run(self) -> None:
        """Rates first, then row by row."""
        self._settle()
        if not self.on_gpu:
            self.rates = measure_rates(self.settings, self.ruling.barrier, self._all_numbers)
            self.report(self.rates)
        for collective in self.settings.collectives:
            fixed = {} if self.on_gpu else self._fixed(collective)
            sizes = self.settings.sizes(collective)
            for timing in self.settings.timings:
                for nbytes in sizes:
                    for row in self._rows(collective, timing, nbytes, fixed, len(sizes)):
                        self.report(row)

    def _settle(self) -> None:
        """Small calls for a while: what loads in the background once a group is in use shall not meet the first row."""
        began = time.perf_counter()
        while self._slowest(time.perf_counter() - began) < self.settings.seconds * _SETTLING:
            pass

    def _all_numbers(self, number: float) -> list[float]:
        found: list[float] = self.ruling.all_numbers(torch.tensor([number], dtype=torch.float64)).tolist()
        return found

    def _slowest(self, number: float) -> float:
        return max(self._all_numbers(number))

    def _by(self, contender: Contender) -> AbstractContextManager[None]:
        named = contender.backend == "unisono" and contender.algorithm not in ("", PERSISTENT)
        return unisono.algorithm(contender.algorithm) if named else nullcontext()

    def _enter(self, case: Case, timing: str = "eager") -> list[_Entrant]:
        """Every contender, checked; one that refuses the call, on any rank, says so and is left out."""
        return [self._entrant(case, timing, contender) for contender in self.settings.contenders]

    def _entrant(self, case: Case, timing: str, contender: Contender) -> _Entrant:
        entrant = _Entrant(contender, lambda: None)
        caller = self.callers.get(contender.backend)
        if caller is None:
            entrant.refused = f"torch {torch.__version__} is built without it"
            return entrant
        self._attempt(entrant, partial(self._first_call, case, timing, caller, entrant))
        if not entrant.refused and self.settings.check:
            entrant.wrong = round(sum(self._all_numbers(case.wrong(caller.output(case)))))
        if not entrant.refused and self.on_gpu:  # a call that cannot be captured is refused as well
            self._attempt(entrant, partial(entrant.clock.seconds, 1))
        return entrant

    def _attempt(self, entrant: _Entrant, step: Callable[[], Any]) -> None:
        """A step of a contender; what it raises, on any rank, is its refusal."""
        try:
            with self._by(entrant.contender):
                step()
        except Exception as error:
            entrant.refused = first_line(error)
        if any(self._all_numbers(bool(entrant.refused))):
            entrant.refused = entrant.refused or "another rank refused"

    def _first_call(self, case: Case, timing: str, caller: Caller, entrant: _Entrant) -> None:
        """Makes the call on the known input, and notes its time, but on GPUs, where it compiles and loads."""
        contender = entrant.contender
        if self.on_gpu and contender.backend == "unisono" and contender.algorithm:
            build(contender.algorithm, case.collective, self.settings.ranks)  # a refused call on GPUs fails its group
        case.fill()
        began = time.perf_counter()
        asynchronous = self.settings.asynchronous or timing == "async"
        entrant.call = caller.call(case, asynchronous, contender.algorithm)
        entrant.call()
        if not self.on_gpu:
            entrant.first = time.perf_counter() - began
        entrant.clock = clock_of(self.settings, timing, entrant.call, case.nbytes)

    def _fixed(self, collective: str) -> dict[str, float]:
        """Seconds of a call on one element per rank, by contender: what a call costs whatever its size."""
        case = self._case(collective, 1)
        found = {}
        for entrant in self._enter(case):
            if not entrant.refused:
                entrant.iterations = self._iterations(entrant, 0.02)
                found[entrant.contender.name] = min(self._block(entrant) for _ in range(3))
        return found

    def _case(self, collective: str, nbytes: int) -> Case:
        return Case(self.settings, collective, nbytes, self.rank, self.tables)

    def _rows(
        self, collective: str, timing: str, nbytes: int, fixed: dict[str, float], sizes: int
    ) -> Iterator[Row]:  # fmt: skip
        settings, case = self.settings, self._case(collective, nbytes)
        entrants = self._enter(case, timing)
        able = [entrant for entrant in entrants if not entrant.refused]
        share = settings.seconds / (sizes * max(1, len(able)) * (settings.runs + 2))
        for entrant in able:
            entrant.iterations = self._iterations(entrant, share)
        times: dict[str, list[float]] = {entrant.contender.name: [] for entrant in entrants}
        for _ in range(settings.runs):
            for entrant in able:
                times[entrant.contender.name].append(self._block(entrant))
        for entrant in able:
            entrant.clock.close()
        for entrant in entrants:
            yield self._row(case, timing, entrant, times[entrant.contender.name], fixed)

    def _iterations(self, entrant: _Entrant, share: float) -> int:
        """Warms up, and says how many calls make a block of ``share`` seconds."""
        if self._slowest(entrant.first) > 2 * share:
            return 1
        entrant.iterations = 1
        for _ in range(self.settings.warm_up):
            self._block(entrant)
        pace = self._block(entrant)
        if pace < share / 20:
            entrant.iterations = max(1, min(entrant.clock.most, int(share / 4 / pace)))
            pace = self._block(entrant)
        return max(1, min(entrant.clock.most, round(share / pace)))

    def _block(self, entrant: _Entrant) -> float:
        """Mean seconds per call on the slowest rank."""
        self.ruling.barrier()
        with self._by(entrant.contender):
            taken = entrant.clock.seconds(entrant.iterations)
        return self._slowest(taken)

    def _skew(self, entrant: _Entrant, collective: str) -> float:
        """The spread of the ranks' own times of a call, as a share of the longest; the median of some calls."""
        if collective in _ROOTED or self.settings.ranks == 1:
            return 0.0  # here they differ by what the ranks have to do
        times = []
        self.ruling.barrier()
        with self._by(entrant.contender):
            for _ in range(min(_SAMPLED, entrant.iterations)):
                began = time.perf_counter()
                entrant.call()
                times.append(time.perf_counter() - began)
        by_rank = self.ruling.all_numbers(torch.tensor(times, dtype=torch.float64)).view(self.settings.ranks, -1)
        longest, shortest = by_rank.amax(0), by_rank.amin(0)
        return float(((longest - shortest) / longest).median())

    def _row(
        self, case: Case, timing: str, entrant: _Entrant, times: Sequence[float], fixed: dict[str, float]
    ) -> Row:  # fmt: skip
        settings, name, collective = self.settings, entrant.contender.name, case.collective
        bound = self.rates.bound(collective, case.nbytes, settings.ranks, case.place)
        limit = ""
        if times and self.rates.sizes:
            limit = limit_of(
                collective,
                case.nbytes,
                settings.ranks,
                statistics.median(times),
                fixed.get(name, 0.0),
                self._skew(entrant, collective),
                self.rates,
            )
        return Row(
            collective=collective,
            contender=name,
            nbytes=case.nbytes if collective != "barrier" else 0,
            requested=case.requested,
            count=case.count,
            dtype=settings.dtype,
            op=settings.op if collective in REDUCING else "none",
            place=case.place,
            ranks=settings.ranks,
            iterations=entrant.iterations if times else 0,
            seconds=tuple(times),
            wrong=entrant.wrong,
            factor=bus_factor(collective, settings.ranks),
            bound=bound,
            limit=limit,
            refused=entrant.refused,
            device=settings.device,
            timing=timing,
        )
