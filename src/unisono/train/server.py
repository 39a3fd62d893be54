"""What launchers on this host share: the process that ranks are forked from, and how launcher and ranks end.

It has imported once what all ranks need; the launcher itself never imports torch.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from tempfile import gettempdir
from types import FrameType

from unisono.errors import UnisonoError, UsageError
from unisono.train.orphan import LAUNCHER
from unisono.transport.process import OwnThread

__all__ = [
    "STOP_SECONDS",
    "end_with_launcher",
    "ends_handled",
    "running_ranks",
    "termination_as_exit",
]

Handler = Callable[[int, FrameType | None], None]

STOP_SECONDS = 1.0
_KILLED_EXIT = 128


def _start_server(preloaded: Sequence[str]) -> ForkServerContext:
    """Start the process that ranks are forked from, deaf to Ctrl-C from its first moment on: the launcher ends it.

    It inherits the signals that are blocked here; one that comes meanwhile reaches the launcher right afterwards. The
    resource tracker goes first, because its start would unblock them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unisono.train.orphan", *preloaded])
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise UsageError(
            f"cannot start the process that ranks are forked from: {error}; it needs a socket below "
            f"{gettempdir()}: set TMPDIR to another directory, whose path has less than 70 characters"
        ) from error
    finally:
        os.environ.pop(LAUNCHER)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def running_ranks(
    preloaded: Sequence[str], count: int, main: Callable[..., None], *arguments: object
) -> Iterator[tuple[list[ForkServerProcess], dict[Connection, int]]]:
    """Start ``count`` processes, each of which calls ``main(rank, pipe, *arguments)``; they end with the block.

    Yields them and the other ends of their one-way pipes, with the rank; a rank's end shows there as end of file.
    Raises UnisonoError if there is nothing left to fork a rank from.
    """
    processes: list[ForkServerProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        context = _start_server(preloaded)
        for rank in range(count):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=main, args=(rank, writer, *arguments), daemon=True)
            processes.append(process)
            pipes[reader] = rank
            try:
                process.start()
            except (EOFError, OSError) as error:
                words = f"cannot start rank {rank}: the process that ranks are forked from is gone"
                raise UnisonoError(words) from error
            finally:
                writer.close()
        yield processes, pipes
    finally:
        _end(processes)
        for reader in pipes:
            reader.close()


def _end(processes: Sequence[ForkServerProcess]) -> None:
    """End what still runs: politely, then for good. Takes at most a second."""
    running = [process for process in processes if process.pid is not None]
    for process in running:
        process.terminate()
    for process in running:
        process.join(STOP_SECONDS / len(running))
        process.kill()
        process.join()


@contextmanager
def ends_handled(handler: Handler) -> Iterator[None]:
    """Have SIGTERM and the end of the terminal call ``handler``, unless they are ignored, as by nohup."""
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in ends}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def termination_as_exit() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal, leave this process through its `finally` clauses, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_KILLED_EXIT + number)

    with ends_handled(leave):
        yield


def end_with_launcher() -> None:
    """The first thing a rank does: it leaves Ctrl-C to the launcher, and ends with it, however that goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    OwnThread(target=_end_with_parent, name="unisono ends with its launcher", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
