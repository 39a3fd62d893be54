"""Tune: measure every algorithm on this machine, so that the choice rests on facts; by the bench, on local ranks.

On GPUs what is measured is what `gpu/defaults.py` chooses from: the schedules of its table, and NCCL.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from unisono.algorithms import list_algorithms
from unisono.bench.launch import launch
from unisono.bench.result import Rates
from unisono.bench.result import Row as Result
from unisono.bench.settings import Contender, Settings
from unisono.bench.weights import Case, WeightSettings, launch_weights
from unisono.errors import UsageError
from unisono.gpu.defaults import NCCL, TABLE
from unisono.selection import BY_DEFAULT, Measured, Push, Row

__all__ = ["GPU_COLLECTIVES", "GPU_SIZES", "SIZES", "runnable", "tune", "tune_weights"]

SIZES = (64, 1 << 10, 1 << 14, 1 << 18, 1 << 22)
GPU_SIZES = (1 << 12, 1 << 14, *(1 << k for k in range(16, 25)))
"""Up to 16 MiB: above, kernels take too many multiprocessors from what computes beside them to be chosen by time."""
GPU_COLLECTIVES = tuple(dict.fromkeys(row.collective for row in TABLE))

_RUNS, _GPU_RUNS, _SECONDS = 3, 5, 0.05  # of one algorithm at one size
_MODELS = ((1, 1), (3000, 64), (16, 60_000), (64, 120_000))
"""What tells apart the costs of an update, of a tensor, and of bytes that stay in caches or do not."""
_PASSES, _PUSHES = 2, 9  # so many pushes of each model, and again of models made after those of all others


def runnable(*collectives: str) -> list[str]:
    """Names of the algorithms that real ranks can run for any of these collectives, sorted."""
    return sorted({e.name for c in collectives for e in list_algorithms(c) if not e.simulation_only})


def tune(
    collectives: Sequence[str],
    ranks: int,
    sizes: Sequence[int] = SIZES,
    names: Sequence[str] | None = None,
    on_row: Callable[[Row], None] | None = None,
    device: str = "cpu",
) -> Measured:
    """Measure each algorithm for each collective and size on new processes of this host, in float32.

    Args:
        collectives: their names.
        ranks: number of processes.
        sizes: bytes, as nccl-tests count; what is measured is rounded to whole elements, a barrier has none.
        names: restricts the algorithms; one that does not have a collective, or does not fit, is left out there.
        on_row: is told of each result as it comes.
        device: cpu, or cuda, where a rank has a GPU of its own and replays of CUDA graphs are timed.

    Raises:
        UsageError: a number is out of range.
        PeerLostError: a process died.

    """
    on_gpu = device == "cuda"
    usual = [NCCL, *(row.schedule for row in TABLE)] if on_gpu else [BY_DEFAULT, *runnable(*collectives)]
    wanted = list(dict.fromkeys(names or usual))
    sized = any(collective != "barrier" for collective in collectives)
    if sized and min(sizes, default=0) < 1:
        raise UsageError(f"tune measures sizes of 1 byte or more, got {', '.join(map(str, sizes)) or 'none'}")
    settings = Settings(
        collectives=tuple(collectives),
        ranks=ranks,
        listed=tuple(sizes) if sized else (),
        contenders=tuple(map(_contender, wanted)),
        device=device,
        timings=("graph",) if on_gpu else ("eager",),
        runs=_GPU_RUNS if on_gpu else _RUNS,
        seconds=_SECONDS * len(wanted) * (len(sizes) if sized else 1),
        check=False,
    )
    settings.validate()
    rows = []

    def report(news: Rates | Result) -> None:
        if isinstance(news, Result) and not news.refused:
            backend, _, name = news.contender.partition(":")
            algorithm = name or (BY_DEFAULT if backend == "unisono" else backend)
            row = Row(news.collective, ranks, algorithm, news.requested, news.time, device)
            rows.append(row)
            if on_row is not None:
                on_row(row)

    launch(settings, report)
    return Measured(rows)


def _contender(name: str) -> Contender:
    if name == NCCL:
        return Contender(NCCL)
    return Contender("unisono", "" if name == BY_DEFAULT else name)


def tune_weights(ranks: int, on_push: Callable[[Push], None] | None = None) -> Measured:
    """Measure updates of weights on new processes of this host: from one of them to one and to all the others.

    Each way: from memory of the sender's own and shared, to mapped replicas, and from rows on half of the ranks to
    columns on the others. A number is the least of some runs, for what else the machine does makes some slower, on
    average over models that a process makes at first and others that it makes later: their tensors lie scattered over
    memory that was used before, and to look at thousands of them then takes up to twice as long.

    Args:
        ranks: number of processes.
        on_push: is told of each result as it comes.

    Raises:
        UsageError: fewer than two ranks.
        PeerLostError: a process died.

    """
    if ranks < 2:
        raise UsageError(f"weights go from one rank to others: --ranks is {ranks}, expected 2 or more")
    halves = ((ranks // 2, ranks - ranks // 2),) if ranks > 2 else ()
    settings = WeightSettings(
        _MODELS * _PASSES, tuple(dict.fromkeys((1, ranks - 1))), share=True, mapped=True, against=(), reshard=halves,
        runs=_PUSHES, parts=False,
    )  # fmt: skip
    settings.validate()
    found, cases = dict[Case, list[Push]](), iter(settings.cases)

    def report(row: Result) -> None:
        case = next(cases)
        push = Push(case.way, case.senders, case.ranks, case.count, case.nbytes, min(row.seconds))
        found.setdefault(case, []).append(push)
        if on_push is not None:
            on_push(push)

    launch_weights(settings, report)
    return Measured(pushes=[replace(each[0], seconds=fmean(p.seconds for p in each)) for each in found.values()])
