"""The ranks of a bench: N new processes on this host, by mpiexec where MPI is a contender. Never imports torch."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from unisono.bench.mpiexec import measure_by_mpiexec
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings
from unisono.launch import local_ranks, termination_as_exit

__all__ = ["launch"]


def launch(settings: Settings, report: Callable[[Rates | Row], None]) -> None:
    """Measure on ``settings.ranks`` new processes; ``report`` gets rates and rows in this process, as they come.

    Raises PeerLostError if a rank dies, UnisonoError (one line) if one fails, SystemExit on SIGTERM; whatever is raised
    here, also by ``report`` or Ctrl-C, ends the ranks.
    """
    if settings.by_mpiexec:
        with termination_as_exit(), TemporaryDirectory(prefix="unisono-bench-") as folder:
            measure_by_mpiexec(settings, Path(folder), report)
        return
    with local_ranks("unisono.bench.measure:rank_main", settings.ranks, settings) as ranks:
        for row in ranks.messages():
            report(row)
