"""The ranks of a bench: N new processes on this host, or this process as one of those that torchrun has started.

The launcher never imports torch. Ranks end with it: each watches its parent and leaves when that is gone.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings
from unisono.errors import PeerLostError, UnisonoError
from unisono.watch.threads import OwnThread

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

__all__ = ["launch"]

_PRELOADED = ["unisono.bench.measure", "torch._dynamo", "unisono.backend.process_group"]
_STOP_SECONDS = 2.0


def launch(settings: Settings, tell: Callable[[Rates | Row], None]) -> None:
    """Measure on ``settings.ranks`` new processes; ``tell`` hears rates and rows in this process, as they come.

    Raises PeerLostError if a rank dies, UnisonoError (one line) if one fails; whatever is raised here, also by
    ``tell`` or Ctrl-C, ends the ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    processes: list[ForkServerProcess] = []
    pipes: dict[connection.Connection, int] = {}
    with TemporaryDirectory(prefix="unisono-bench-") as folder:
        try:
            for rank in range(settings.ranks):
                reader, writer = context.Pipe(duplex=False)
                where = f"file://{Path(folder) / 'store'}"
                process = context.Process(target=_rank_main, args=(settings, rank, where, writer), daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                pipes[reader] = rank
            _follow(pipes, processes, tell)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(_STOP_SECONDS)
                process.kill()
                process.join()
            for reader in pipes:
                reader.close()


def _follow(
    pipes: dict[connection.Connection, int],
    processes: "list[ForkServerProcess]",
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
                processes[rank].join(_STOP_SECONDS)
                if code := processes[rank].exitcode:
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    raise PeerLostError(f"rank {rank} of the bench died ({how})") from None
                continue
            if isinstance(message, str):
                raise UnisonoError(f"rank {rank} cannot measure: {message}")
            tell(message)


def _rank_main(settings: Settings, rank: int, init_method: str, pipe: connection.Connection) -> None:
    """What a rank's process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    OwnThread(target=_end_with_parent, name="unisono end with parent", daemon=True).start()
    try:
        from unisono.bench.measure import run_rank

        run_rank(settings, rank, init_method, pipe.send)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        pipe.close()
    os._exit(0)  # the backends' threads have nothing left to say


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
