"""Tune: measure every algorithm on this machine, so that the choice rests on facts; by the bench, on local ranks."""

from collections.abc import Callable, Sequence

from unisono.algorithms import list_algorithms
from unisono.bench.launch import launch
from unisono.bench.result import Rates
from unisono.bench.result import Row as Result
from unisono.bench.settings import Contender, Settings
from unisono.errors import UsageError
from unisono.selection import BY_DEFAULT, Measured, Row

__all__ = ["SIZES", "runnable", "tune"]

SIZES = (64, 1 << 10, 1 << 14, 1 << 18, 1 << 22)

_RUNS, _SECONDS = 3, 0.05  # of one algorithm at one size


def runnable(*collectives: str) -> list[str]:
    """Names of the algorithms that real ranks can run for any of these collectives, sorted."""
    return sorted({e.name for c in collectives for e in list_algorithms(c) if not e.simulation_only})


def tune(
    collectives: Sequence[str],
    ranks: int,
    sizes: Sequence[int] = SIZES,
    names: Sequence[str] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Measured:
    """Measure each algorithm for each collective and size on new processes of this host, in float32.

    Args:
        collectives: their names.
        ranks: number of processes.
        sizes: bytes, as nccl-tests count; what is measured is rounded to whole elements, a barrier has none.
        names: restricts the algorithms; one that does not have a collective, or does not fit, is left out there.
        on_row: is told of each result as it comes.

    Raises:
        UsageError: a number is out of range.
        PeerLostError: a process died.

    """
    wanted = list(dict.fromkeys(names or [BY_DEFAULT, *runnable(*collectives)]))
    sized = any(collective != "barrier" for collective in collectives)
    if sized and min(sizes, default=0) < 1:
        raise UsageError(f"tune measures sizes of 1 byte or more, got {', '.join(map(str, sizes)) or 'none'}")
    settings = Settings(
        collectives=tuple(collectives),
        ranks=ranks,
        listed=tuple(sizes) if sized else (),
        contenders=tuple(Contender("unisono", "" if name == BY_DEFAULT else name) for name in wanted),
        runs=_RUNS,
        seconds=_SECONDS * len(wanted) * (len(sizes) if sized else 1),
        check=False,
    )
    settings.validate()
    rows = []

    def report(news: Rates | Result) -> None:
        if isinstance(news, Result) and not news.refused:
            _, _, name = news.contender.partition(":")
            row = Row(news.collective, ranks, name or BY_DEFAULT, news.requested, news.time)
            rows.append(row)
            if on_row is not None:
                on_row(row)

    launch(settings, report)
    return Measured(rows)
