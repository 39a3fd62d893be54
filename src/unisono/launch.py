"""Ranks on this host: started together, watched together, ended together. Never imports torch.

The ranks are forked from one server process that has imported torch once, so that they start in hundredths of a second;
with torch.multiprocessing.start_processes the launcher and every rank would import it for themselves. Whatever ends the
launcher ends the ranks: errors, Ctrl-C and SIGTERM through `local_ranks`; should it be killed outright, each rank
notices that and leaves, and so does the server.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from time import monotonic
from traceback import extract_tb
from types import FrameType
from typing import Any, NamedTuple

from unisono.errors import PeerLostError, UnisonoError, UsageError
from unisono.transport.process import OwnThread

__all__ = [
    "MOST_RANKS",
    "STOP_SECONDS",
    "LocalRanks",
    "ends_handled",
    "local_ranks",
    "termination_as_exit",
    "torchrun_rank",
]

Handler = Callable[[int, FrameType | None], None]

STOP_SECONDS = 1.0
MOST_RANKS = 1024
"""Processes that one host is asked for, at most."""
_CAUSE_SECONDS = 0.3  # after a first failure: the time in which its true cause may still come in
_KILLED_EXIT = 128
_LAUNCHER = "UNISONO_LAUNCHER"
_PR_SET_PDEATHSIG = 1
_PRELOADED = ["torch._dynamo", "unisono.backend.process_group"]  # needed late: each rank would import them for itself


class _Failure(NamedTuple):
    """Why a rank ended; a process that was killed explains the errors of its peers, never the other way round."""

    rank: int
    message: str
    killed: bool = False

    def error(self) -> UnisonoError:
        kind = PeerLostError if self.killed else UnisonoError
        return kind(f"rank {self.rank} failed: {self.message}")


class LocalRanks:
    """Running ranks, and a pipe to each whose end has not been seen."""

    def __init__(self, processes: list[ForkServerProcess], pipes: dict[Connection, int]) -> None:
        self.processes, self.pipes = processes, pipes

    def messages(self) -> Iterator[Any]:
        """The messages of the ranks, as they arrive, until all have ended well.

        Raises PeerLostError if a rank was killed, UnisonoError if one raised; the message is one line and names rank,
        error and place.
        """
        failures: list[_Failure] = []
        while self.pipes and not failures:
            for message in self._ready(timeout=None):
                if isinstance(message, _Failure):
                    failures.append(message)
                else:
                    yield message
        end = monotonic() + _CAUSE_SECONDS
        while failures and self.pipes and (left := end - monotonic()) > 0:
            failures += [message for message in self._ready(left) if isinstance(message, _Failure)]
        if failures:
            raise min(failures, key=lambda failure: not failure.killed).error()

    def _ready(self, timeout: float | None) -> Iterator[Any]:
        """Messages that have arrived; a rank that ended otherwise than well has sent a failure."""
        for reader in connection.wait(list(self.pipes), timeout):
            assert isinstance(reader, Connection)
            rank = self.pipes[reader]
            try:
                yield reader.recv()
            except (EOFError, OSError):  # also in the middle of a message
                del self.pipes[reader]
                reader.close()
                if failure := _death(rank, self.processes[rank]):
                    yield failure


def _death(rank: int, process: ForkServerProcess) -> _Failure | None:
    """The end of a rank whose pipe has closed; None if it ended well."""
    process.join(STOP_SECONDS)
    code = process.exitcode
    if code == 0:
        return None
    if code is not None and code < 0:
        return _Failure(rank, f"process {process.pid} was ended by {signal.Signals(-code).name}", killed=True)
    return _Failure(rank, f"process {process.pid} ended with exit code {code} and no word")


@contextmanager
def local_ranks(main: str, count: int, *arguments: object) -> Iterator[LocalRanks]:
    """Start `count` processes, each of which calls a function; they end with the block.

    Args:
        main: "module:function". It is called as function(rank, pipe, init_method, *arguments): it sends on `pipe`, a
            multiprocessing connection, what `messages` yields; at `init_method` the ranks meet, as in
            `init_process_group`. What it raises is a failure of the rank.
        count: how many.
        arguments: anything that can be pickled.

    SIGTERM, and the end of the terminal, leave the block as Ctrl-C does, by SystemExit. Raises UnisonoError if there is
    nothing to fork a rank from, or no descriptors are left.

    """
    ranks = LocalRanks([], {})
    with termination_as_exit(), TemporaryDirectory(prefix="unisono-ranks-") as folder:
        meeting = f"file://{Path(folder) / 'store'}"
        try:
            context = _start_server([main.partition(":")[0], *_PRELOADED])
            for rank in range(count):
                try:
                    mine, its = context.Pipe(duplex=False)
                except OSError as error:
                    raise UnisonoError(f"cannot start rank {rank}: {error.strerror}: see `ulimit -n`") from None
                process = context.Process(target=_run, args=(main, rank, its, meeting, *arguments), daemon=True)
                ranks.processes.append(process)
                ranks.pipes[mine] = rank
                try:
                    process.start()
                except (EOFError, OSError) as error:
                    words = f"cannot start rank {rank}: the process that ranks are forked from is gone"
                    raise UnisonoError(words) from error
                finally:
                    its.close()
            yield ranks
        finally:
            _end(ranks.processes)
            for pipe in ranks.pipes:
                pipe.close()


def torchrun_rank(ranks: int | None) -> tuple[int | None, int | None]:
    """This process's rank and world size under torchrun; elsewhere None, as it is to launch the ranks, and `ranks`.

    Raises UsageError if torchrun's variables are no numbers, or `ranks` is given and is another number.
    """
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if None in found.values():
        return None, ranks
    try:
        rank, world_size = (int(value) for value in found.values() if value is not None)
    except ValueError:
        raise UsageError(f"the environment has {found}, expected whole numbers as torchrun sets them") from None
    if ranks not in (None, world_size):
        raise UsageError(f"--ranks is {ranks}, but WORLD_SIZE says {world_size}: leave --ranks out under torchrun")
    return rank, world_size


def _start_server(preloaded: Sequence[str]) -> ForkServerContext:
    """Start the process that ranks are forked from, deaf to Ctrl-C from its first moment on: the launcher ends it.

    It inherits the signals that are blocked here; one that comes meanwhile reaches the launcher right afterwards. The
    resource tracker goes first, because its start would unblock them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preloaded])
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise UsageError(
            f"cannot start the process that ranks are forked from: {error}; it needs a socket below "
            f"{gettempdir()}: set TMPDIR to another directory, whose path has less than 70 characters"
        ) from error
    finally:
        os.environ.pop(_LAUNCHER)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _run(main: str, rank: int, pipe: Connection, *arguments: object) -> None:
    """The main function of a rank: leaves Ctrl-C to the launcher, ends with it, sends its failure last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    OwnThread(target=_end_with_parent, name="unisono ends with its launcher", daemon=True).start()
    module, _, function = main.partition(":")
    try:
        getattr(importlib.import_module(module), function)(rank, pipe, *arguments)
    except BaseException as error:
        pipe.send(_Failure(rank, _one_line(error)))
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _one_line(error: BaseException) -> str:
    """An error in one line; one that is not ours also says where in the code it was raised."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, UnisonoError):
        return f"{type(error).__name__}: {text}"
    place = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


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


def _end_with_launcher_at_once() -> None:
    """Has Linux end the process that ranks are forked from, if it imports this module, with the launcher.

    That process looks for its parent's end only after it has imported torch, seconds later. The launcher names itself
    in an environment variable, for the one case that the kernel cannot know: it was gone before it could be asked for.
    """
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):
            os._exit(1)


_end_with_launcher_at_once()
