"""Fresh rank processes that may be killed, stopped or left to die, and what each of them told and how it ended.

    def loops(rank, world_size):                     # module-level, runs in every rank
        tell("ready")
        return attempt(lambda: [dist.barrier() for _ in range(10**6)])

    def test_killed():
        with Job(loops, 3) as job:
            job.hear("ready")
            job.signal(1, signal.SIGKILL)
            first, _, third = job.results()          # None for a rank that gave no result

Ranks are forked from multiprocessing's fork server, which has imported torch once. A rank given as a ``script`` is a
program with a top level, an excepthook and an interpreter's end of its own (nursery.py). Whatever still runs at the
end is killed.
"""

import atexit
import ctypes
import datetime
import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ranks import FORKS

__all__ = ["DUMP_STACKS", "Fault", "Job", "attempt", "end_with_parent", "init", "line_of", "tell"]

DUMP_STACKS = signal.SIGRTMIN + 7
PR_SET_PDEATHSIG = 1


class Fault(NamedTuple):
    """How a call ended that should have failed: the error's class and text, when, and how long it took."""

    kind: str
    text: str
    at: float  # time.monotonic(), the same clock in all processes
    seconds: float

    def says(self, kind: str, *facts: str) -> None:
        """Asserts the class of the error and that its text holds every fact (a regular expression)."""
        assert self.kind == kind, f"{self.kind or 'no error'} instead of {kind}: {self.text}"
        for fact in facts:
            assert re.search(fact, self.text), f"{fact!r} is not in: {self.text}"


def attempt(call: Callable[[], Any]) -> Fault:
    """Makes a call and tells how it failed; kind is empty and text its value if it did not."""
    start = time.monotonic()
    kind, text = "", ""
    try:
        text = repr(call())
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    now = time.monotonic()
    return Fault(kind, text, now, now - start)


def line_of(fn: Callable[..., Any], text: str) -> str:
    """``file.py:123`` as a pattern: the line of a function's source that holds ``text``."""
    import inspect

    lines, first = inspect.getsourcelines(fn)
    found = [first + k for k, line in enumerate(lines) if text in line]
    assert len(found) == 1, f"{text!r} is on {len(found)} lines of {fn.__name__}"
    return re.escape(f"{Path(inspect.getfile(fn)).name}:{found[0]} ")


def end_with_parent() -> None:
    """This process is killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def init(meeting: str, rank: int, world_size: int, timeout: float = 30.0, backend: str = "unisono") -> None:
    """Joins the default group that meets at a file."""
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=limit)


def hurry(seconds: float) -> None:
    """From now on calls of the default group, whose making may take its time, end after ``seconds``."""
    import torch.distributed as dist

    dist.barrier()
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=seconds))


class Job:
    """``world_size`` new ranks that call ``fn(rank, world_size, *args)``, in a default group unless ``group`` is false.

    ``scripts`` gives the program text of ranks that are started by exec; torch and dist are imported in it, the group
    is up, and ``meeting`` is its file.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        group: bool = True,
        scripts: Mapping[int, str] | None = None,
    ) -> None:
        self.fn, self.world_size, self.args = fn, world_size, args
        self.group, self.scripts = group, scripts or {}
        self.told: dict[int, set[str]] = {rank: set() for rank in range(world_size)}
        self._results: dict[int, Any] = {}
        self._pipes: dict[connection.Connection, int] = {}
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._programs: dict[int, int] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-hangs-"))
        self.meeting = str(self.folder / "meeting")

    def __enter__(self) -> "Job":
        for rank in range(self.world_size):
            if rank in self.scripts:
                self._start_program(rank)
                continue
            ours, theirs = FORKS.Pipe()
            meeting = self.meeting if self.group else None
            arguments = (theirs, str(self.folder), meeting, rank, self.world_size)
            payload = pickle.dumps((self.fn, self.args))
            process = FORKS.Process(target=_serve, args=(*arguments, list(sys.path), payload), daemon=True)
            process.start()
            theirs.close()
            self._processes[rank], self._pipes[ours] = process, rank
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for pid in self._programs.values():
            os.kill(pid, signal.SIGKILL)
            _NURSERY.order(reap=pid)
        for process in self._processes.values():
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_program(self, rank: int) -> None:
        text = (
            "import os, signal, sys, threading, time, torch, torch.distributed as dist\n"
            f"sys.path[:] = {list(sys.path)!r}\n"
            "from hangs.job import attempt, init\n"
            f"meeting, rank, world_size = {self.meeting!r}, {rank}, {self.world_size}\n"
            + ("init(meeting, rank, world_size)\n" if self.group else "")
            + self.scripts[rank]
        )
        path = self.folder / f"program_{rank}.py"
        path.write_text(text)
        errors = str(self.folder / f"errors-{rank}")
        self._programs[rank] = int(_NURSERY.order(program=str(path), errors=errors))

    def reap(self, rank: int) -> int:
        """Waits for the end of a script, as its parent does, and returns its exit code."""
        return int(_NURSERY.order(reap=self._programs.pop(rank)))

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        pid = self._programs[rank] if rank in self._programs else self._processes[rank].pid
        assert pid is not None
        return pid

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to a rank; returns when."""
        now = time.monotonic()
        os.kill(self.pid(rank), number)
        return now

    def hear(self, word: str, ranks: Iterable[int] | None = None, seconds: float = 30.0) -> None:
        """Waits until these ranks (all) have told ``word``."""
        wanted = set(range(self.world_size)) - set(self.scripts) if ranks is None else set(ranks)
        self._listen(lambda: all(word in self.told[rank] for rank in wanted), seconds, f"did not tell {word!r}")

    def result(self, rank: int, seconds: float = 30.0) -> Any:
        """What one rank's function returned, whatever the others do meanwhile."""
        self._listen(lambda: rank in self._results or rank not in self._pipes.values(), seconds, "did not end")
        return self._results.get(rank)

    def results(self, seconds: float = 30.0, killed: Iterable[int] | None = None) -> list[Any]:
        """What every rank's function returned; None for one that died. All do but those ``killed``, if these are given.

        Raises AssertionError with what the others wrote to their standard error.
        """
        self._listen(lambda: not self._pipes, seconds, "did not end")
        dead = {rank for rank in range(self.world_size) if rank not in self._results}
        if killed is not None and dead != set(killed):
            raise AssertionError("\n".join(f"--- rank {rank}: {self.errors(rank)}" for rank in sorted(dead)))
        return [self._results.get(rank) for rank in range(self.world_size)]

    def errors(self, rank: int) -> str:
        """What a rank wrote to its standard error."""
        return (self.folder / f"errors-{rank}").read_text()

    def _listen(self, enough: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not enough():
            ready = connection.wait(list(self._pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {sorted(self._pipes.values())} {what} in {seconds:g} s{self._stacks()}")
            for pipe in ready:
                self._hear_one(pipe)

    def _hear_one(self, pipe: connection.Connection) -> None:
        rank = self._pipes[pipe]
        try:
            kind, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            del self._pipes[pipe]
            pipe.close()
            return
        if kind == "tell":
            self.told[rank].add(value)
        else:
            self._results[rank] = value

    def _stacks(self) -> str:
        for rank in self._pipes.values():
            os.kill(self.pid(rank), DUMP_STACKS)
        time.sleep(0.5)
        texts = [f"\n--- rank {rank} ---\n" + self.errors(rank) for rank in sorted(self._pipes.values())]
        return "".join(texts)


class _Nursery:
    """The one process that forks programs, started when first needed; it ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def order(self, **order: Any) -> str:
        """Gives an order and returns the answer."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()


_NURSERY = _Nursery()
_pipe: connection.Connection | None = None


def tell(word: str) -> None:
    """From inside a rank: lets the test know."""
    assert _pipe is not None
    _pipe.send_bytes(pickle.dumps(("tell", word)))


def _serve(
    pipe: connection.Connection,
    folder: str,
    meeting: str | None,
    rank: int,
    world_size: int,
    path: list[str],
    payload: bytes,
) -> None:
    """Is one rank; an exception goes its way as it does in a user's program."""
    global _pipe
    end_with_parent()
    gc.freeze()
    with open(f"{folder}/errors-{rank}", "w") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.register(DUMP_STACKS, all_threads=True)
    _pipe, sys.path[:] = pipe, path
    import torch

    torch.set_num_threads(1)
    if rank % 2:  # both ways are tested, and that they understand each other
        os.environ["UNISONO_FUSED"] = "0"
    fn, args = pickle.loads(payload)
    if meeting is not None:
        init(meeting, rank, world_size)
    result = fn(rank, world_size, *args)
    pipe.send_bytes(pickle.dumps(("result", result)))
