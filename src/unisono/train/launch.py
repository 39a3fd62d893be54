"""N ranks on this host: started together, watched together, ended together.

The ranks are forked from one server process that has imported torch once. The launcher itself never imports torch.
Whatever ends the launcher ends the ranks: an error on any rank, Ctrl-C and SIGTERM end them through `running_ranks`;
should the launcher be killed outright, each rank notices it and leaves, and so does the server (orphan.py).
"""

import os
import signal
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from traceback import extract_tb
from typing import TYPE_CHECKING, NamedTuple

from unisono.errors import PeerLostError, UnisonoError
from unisono.train.server import STOP_SECONDS, end_with_launcher, running_ranks, termination_as_exit
from unisono.train.settings import Outcome, Settings, StepRecord

if TYPE_CHECKING:
    from unisono.train.job import Listener

__all__ = ["launch"]

# Imported once, for all ranks; the last two are needed late and would else be imported by each rank for itself.
PRELOADED = ["unisono.train.job", "torch._dynamo", "unisono.backend.process_group"]
GRACE_SECONDS = 0.3  # after a first failure: the time in which its true cause may still come in


class _Failure(NamedTuple):
    """Why a rank ended; a process that was killed explains the errors of its peers, never the other way round."""

    rank: int
    message: str
    killed: bool = False

    def error(self) -> UnisonoError:
        kind = PeerLostError if self.killed else UnisonoError
        return kind(f"rank {self.rank} failed: {self.message}")


def launch(settings: Settings, on_steps: "Listener") -> Outcome:
    """Run the job on `settings.ranks` new processes and return rank 0's outcome.

    Args:
        settings: checked by the caller, so that a mistake costs no start of processes.
        on_steps: called in this process with the records of every few steps.

    Raises:
        PeerLostError: a rank was killed.
        UnisonoError: a rank raised; the message is one line and names rank, error and place.

    """
    with (
        termination_as_exit(),
        TemporaryDirectory(prefix="unisono-train-") as folder,
        running_ranks(PRELOADED, settings.ranks, _rank_main, settings, Path(folder) / "store") as (processes, pipes),
    ):
        return _Ranks(processes, pipes).follow(on_steps)


class _Ranks:
    """The processes of one run and the pipes from those whose end has not been seen."""

    def __init__(self, processes: list[ForkServerProcess], pipes: dict[connection.Connection, int]) -> None:
        self.processes, self.pipes = processes, pipes

    def follow(self, on_steps: "Listener") -> Outcome:
        """Pass on records until all ranks have ended well; raise what went wrong otherwise."""
        outcome = None
        while self.pipes:
            failures = []
            for message in self._messages(timeout=None):
                if isinstance(message, _Failure):
                    failures.append(message)
                elif isinstance(message, Outcome):
                    outcome = message
                else:
                    on_steps(message)
            if failures:
                failures += self._late_failures()
                raise min(failures, key=lambda failure: not failure.killed).error()
        assert outcome is not None, "rank 0 ended well without an outcome"
        return outcome

    def _messages(self, timeout: float | None) -> Iterator[list[StepRecord] | Outcome | _Failure]:
        """What has come in, waiting for at least one message or end of file."""
        for reader in connection.wait(list(self.pipes), timeout):
            assert isinstance(reader, connection.Connection)
            try:
                yield reader.recv()
            except (EOFError, ConnectionResetError):
                rank = self.pipes.pop(reader)
                reader.close()
                if failure := _death(rank, self.processes[rank]):
                    yield failure

    def _late_failures(self) -> list[_Failure]:
        """What else goes wrong within the time of grace."""
        failures: list[_Failure] = []
        end = monotonic() + GRACE_SECONDS
        while self.pipes and (left := end - monotonic()) > 0:
            failures += [late for late in self._messages(left) if isinstance(late, _Failure)]
        return failures


def _death(rank: int, process: ForkServerProcess) -> _Failure | None:
    """How a rank whose pipe has closed ended; None when it ended well."""
    process.join(STOP_SECONDS)
    code = process.exitcode
    if code == 0:
        return None
    if code is not None and code < 0:
        return _Failure(rank, f"process {process.pid} was ended by {signal.Signals(-code).name}", killed=True)
    return _Failure(rank, f"process {process.pid} ended with exit code {code} and no word")


def _rank_main(rank: int, pipe: connection.Connection, settings: Settings, store: Path) -> None:
    """What a rank's process does; its last act is to send the outcome or the failure."""
    end_with_launcher()
    try:
        from unisono.train.job import run_rank

        def send(records: list[StepRecord]) -> None:
            if rank == 0:
                pipe.send(records)

        outcome = run_rank(settings, rank, f"file://{store}", send)
        if rank == 0:
            pipe.send(outcome)
    except BaseException as error:
        pipe.send(_Failure(rank, _one_line(error)))
        os._exit(1)


def _one_line(error: BaseException) -> str:
    """An error in one line; one that is not ours also says where in the code it was raised."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, UnisonoError):
        return f"{type(error).__name__}: {text}"
    place = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"
