"""Rank processes for tests: started once, reused by every test, never left hanging.

    def total(rank, world_size, scale):            # module-level, runs in every rank
        x = torch.full((4,), float(rank) * scale)
        dist.all_reduce(x)
        return x.tolist()

    def test_total():
        assert ranks(3).run(total, 2) == [[6.0] * 4] * 3

A rank that raises fails the test with its traceback (`RankFailure`); a rank that hangs is cut at the timeout and
every rank's Python stack is shown. After a failure the processes are replaced, so that one broken test cannot spoil the
next. The processes are forked from multiprocessing's fork server, which has imported torch once; they die with pytest.
"""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from unisono import algorithms

__all__ = ["BACKEND", "FORKS", "HOSTS", "RankFailure", "Ranks", "be_on_host", "ranks"]

COMPILED = os.environ.get("UNISONO_FUSED") != "0"  # make test-gpu runs where compiling every loop takes minutes
FORKS = multiprocessing.get_context("forkserver")
"""Where every test gets its processes from: the one server has imported what takes long, and the processes share it."""
FORKS.set_forkserver_preload(
    [
        "torch._dynamo", "torch.distributed", "pytest", "unisono.backend.device_group", "unisono.train.job",
        *(["unisono.runtime.loaded"] if COMPILED else []),
        *(module.name for module in pkgutil.iter_modules(algorithms.__path__, "unisono.algorithms.")),
    ]
)  # fmt: skip

BACKEND = "unisono"
TIMEOUT = 60.0  # seconds one run() may take, unless it says otherwise
HOSTS = int(os.environ.get("UNISONO_TEST_HOSTS", "1"))  # over so many the ranks are spread, by turns: make test-hosts
GRACE = 8.0  # seconds the other ranks get to end once one of them has failed
DUMP_STACKS = signal.SIGRTMIN + 7
PR_SET_PDEATHSIG = 1


class RankFailure(AssertionError):
    """At least one rank raised, died or hung; `failures` maps the rank to its traceback, exit status or stack."""

    def __init__(self, what: str, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__(what + "".join(f"\n--- rank {r} ---\n{text}" for r, text in sorted(failures.items())))


class Group(NamedTuple):
    """The default process group the ranks are in, or shall be in."""

    backend: str
    world_size: int
    timeout: float


class Ranks:
    """`world_size` of the pool's processes, with or without a default process group."""

    def __init__(self, pool: "Pool", world_size: int, group: Group | None) -> None:
        self.pool, self.world_size, self.group = pool, world_size, group

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank and return the results in rank order.

        `fn` must be importable (module level); arguments and results must pickle. Raises RankFailure.
        """
        payload = pickle.dumps((fn, self.world_size, args))
        return self.pool.run(payload, self.world_size, self.group, timeout)


def ranks(world_size: int, *, group: bool = True, backend: str = BACKEND, group_timeout: float = 30.0) -> Ranks:
    """Give `world_size` reusable rank processes.

    With `group` a default process group of `backend` is up on all of them (kept from run to run, whose collectives time
    out after `group_timeout` seconds); without it, fn starts and ends its own groups.
    """
    return Ranks(_POOL, world_size, Group(backend, world_size, group_timeout) if group else None)


class Worker(NamedTuple):
    """One rank process as pytest sees it."""

    process: multiprocessing.process.BaseProcess
    pipe: connection.Connection
    stack_file: Path


class Pool:
    """The rank processes; grows to the largest world size asked for, is replaced after a failure."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.group: Group | None = None
        self.directory: Path | None = None
        self.generation = itertools.count()

    def run(self, payload: bytes, world_size: int, group: Group | None, timeout: float) -> list[Any]:
        """Bring the ranks into `group`, then run the pickled call on ranks 0..world_size-1."""
        try:
            self._start(world_size)
            if group != self.group:
                self._change_group(group)
            return self._ask(range(world_size), ("run", list(sys.path), payload), timeout)
        except BaseException:  # whatever cut this short (pytest-timeout, Ctrl-C), the ranks are in an unknown state
            self.close()
            raise

    def close(self) -> None:
        """Kill every rank process and remove the pool's files; the next run starts anew."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self.workers, self.group = [], None
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def _start(self, world_size: int) -> None:
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="unisono-ranks-"))
        for rank in range(len(self.workers), world_size):
            ours, theirs = FORKS.Pipe()
            stack_file = self.directory / f"stack-{rank}"
            process = FORKS.Process(target=_serve, args=(rank, theirs, str(stack_file)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(Worker(process, ours, stack_file))

    def _change_group(self, group: Group | None) -> None:
        if self.group is not None:
            self._ask(range(self.group.world_size), ("leave",), TIMEOUT)
        self.group = None
        if group is not None:
            assert self.directory is not None
            meeting_file = self.directory / f"meeting-{next(self.generation)}"
            self._ask(range(group.world_size), ("join", group, str(meeting_file)), TIMEOUT)
            self.group = group

    def _ask(self, members: Iterable[int], order: tuple[Any, ...], timeout: float) -> list[Any]:
        waiting = {self.workers[rank].pipe: rank for rank in members}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        message = pickle.dumps(order)
        for pipe, rank in waiting.items():
            try:
                pipe.send_bytes(message)
            except OSError:
                failures[rank] = self._epitaph(rank)
        deadline = time.monotonic() + timeout
        while waiting and (ready := connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    worked, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    worked, answer = False, self._epitaph(rank)
                (results if worked else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failures or waiting:
            what = "a rank failed" if failures else f"no end after {timeout:g} s"
            raise RankFailure(f"{what} ({order[0]})", failures | self._stacks(waiting.values()))
        return [results[rank] for rank in sorted(results)]

    def _epitaph(self, rank: int) -> str:
        process = self.workers[rank].process
        process.join(5)
        return f"the process is dead, exit status {process.exitcode}"

    def _stacks(self, hung: Iterable[int]) -> dict[int, str]:
        """Return where each hung rank is now."""
        hung = list(hung)
        for rank in hung:
            os.kill(self.workers[rank].process.pid, DUMP_STACKS)
        if hung:
            time.sleep(0.5)
        return {rank: "hangs here:\n" + self.workers[rank].stack_file.read_text() for rank in hung}


_POOL = Pool()
atexit.register(_POOL.close)


def _serve(rank: int, pipe: connection.Connection, stack_file: str) -> None:
    """Be one rank: carry out orders until the pipe closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server ends with pytest, this ends with it
    gc.freeze()  # a collection would walk, and so copy, all that the server has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle
    import torch

    torch.set_num_threads(1)
    be_on_host(rank)
    # Every other rank uses the compiled loops: both ways are tested, and that they understand each other.
    os.environ["UNISONO_FUSED"] = "now" if COMPILED and rank % 2 == 0 else "0"
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module=r"torch\.")  # what torch warns itself about is not ours to fix
    # torch 2.11 and 2.12 say so even to those who have chosen (check_invariants=False)
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    with open(stack_file, "w") as stacks:
        faulthandler.register(DUMP_STACKS, file=stacks, all_threads=True)
        while True:
            try:
                order = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            try:
                answer = pickle.dumps((True, _obey(rank, *order)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            with contextlib.suppress(OSError):
                pipe.send_bytes(answer)


def be_on_host(rank: int) -> None:
    """Replaces what tells this rank's host from others, if there are several."""
    import socket

    from unisono.transport import host

    if HOSTS > 1:
        number = rank % HOSTS
        host._boot_id = lambda: f"boot-{number}"
        socket.gethostname = lambda: f"host{number}"


def _obey(rank: int, kind: str, *details: Any) -> Any:
    import torch.distributed as dist

    if kind == "leave":
        return dist.destroy_process_group()
    if kind == "join":
        group, meeting_file = details
        return dist.init_process_group(
            group.backend,
            init_method=f"file://{meeting_file}",
            rank=rank,
            world_size=group.world_size,
            timeout=datetime.timedelta(seconds=group.timeout),
        )
    path, payload = details
    sys.path[:] = path
    fn, world_size, args = pickle.loads(payload)
    with warnings.catch_warnings():  # a filter that one test sets is no other test's
        return fn(rank, world_size, *args)
