"""The ranks of a bench: N new processes on this host, started by mpiexec where MPI is a contender.

The launcher never imports torch. Ranks end with it: each watches its parent and leaves when that is gone.
"""

import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from unisono.bench.mpiexec import measure_by_mpiexec
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings
from unisono.errors import PeerLostError, UnisonoError
from unisono.train.server import STOP_SECONDS, end_with_launcher, running_ranks, termination_as_exit

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

__all__ = ["launch"]

_PRELOADED = ["unisono.bench.measure", "torch._dynamo", "unisono.backend.process_group"]


def launch(settings: Settings, tell: Callable[[Rates | Row], None]) -> None:
    """Measure on ``settings.ranks`` new processes; ``tell`` hears rates and rows in this process, as they come.

    Raises PeerLostError if a rank dies, UnisonoError (one line) if one fails, SystemExit on SIGTERM; whatever is raised
    here, also by ``tell`` or Ctrl-C, ends the ranks.
    """
    with termination_as_exit(), TemporaryDirectory(prefix="unisono-bench-") as folder:
        if settings.by_mpiexec:
            measure_by_mpiexec(settings, Path(folder), tell)
            return
        store = f"file://{Path(folder) / 'store'}"
        with running_ranks(_PRELOADED, settings.ranks, _rank_main, settings, store) as ranks:
            _follow(*ranks, tell)


def _follow(
    processes: "list[ForkServerProcess]",
    pipes: dict[connection.Connection, int],
    tell: Callable[[Rates | Row], None],
) -> None:
    """Passes on what comes in until all ranks have ended well; raises what went wrong otherwise."""
    open_ = set(pipes)
    while open_:
        for reader in connection.wait(list(open_)):
            assert isinstance(reader, connection.Connection)
            rank = pipes[reader]
            try:
                message = reader.recv()
            except (EOFError, ConnectionResetError):
                open_.discard(reader)
                processes[rank].join(STOP_SECONDS)
                if code := processes[rank].exitcode:
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    raise PeerLostError(f"rank {rank} of the bench died ({how})") from None
                continue
            if isinstance(message, str):
                raise UnisonoError(f"rank {rank} cannot measure: {message}")
            tell(message)


def _rank_main(rank: int, pipe: connection.Connection, settings: Settings, init_method: str) -> None:
    """What a rank's process does."""
    end_with_launcher()
    try:
        from unisono.bench.measure import run_rank

        run_rank(settings, rank, init_method, pipe.send)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        pipe.close()
    os._exit(0)  # the backends' threads have nothing left to say
