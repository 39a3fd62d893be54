"""One rank of the bench, as mpiexec starts it: ``python -m unisono.bench.mpi_rank ADDRESS``."""

import os
import signal
import sys
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

from unisono.backend.launchers import MPI_RANKS
from unisono.transport.process import OwnThread

__all__ = ["main"]

_SEGMENTS = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")


def main(address: str) -> None:
    """Call the launcher, be given the job, measure; the last word is None, or in one line why there is nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = connection.Client(address, "AF_UNIX")
    rank = next(int(os.environ[name]) for name in MPI_RANKS if name in os.environ)
    pipe.send(rank)
    settings, init_method = pipe.recv()
    OwnThread(target=_end_with, args=(pipe,), name="unisono ends with its launcher", daemon=True).start()
    try:
        from unisono.bench.measure import run_rank

        run_rank(settings, rank, init_method, pipe.send)
        pipe.send(None)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
        _remove_segments()
        os._exit(1)
    os._exit(0)  # the backends' threads have nothing left to say


def _end_with(pipe: "connection.Connection") -> None:
    """Waits for the end of file that is the launcher's end."""
    try:
        pipe.recv()
    finally:
        _remove_segments()
        os._exit(1)


def _remove_segments() -> None:
    """Take away what MPICH and Open MPI leave in /dev/shm unless they are finalized."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if (path := line.split()[-1]).startswith(_SEGMENTS):
                Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1])
