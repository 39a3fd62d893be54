"""Tune: measure every algorithm on this machine, so that the choice rests on facts.

`tune` is a loop over a function that measures; `SharedMemory` is the one that runs the backend with N processes on this
host. Any other measure(collective, algorithm, nbytes, ranks) -> seconds serves as well.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from unisono.algorithms import list_algorithms
from unisono.errors import PeerLostError, UnisonoError, UsageError
from unisono.selection import Measured, Row

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

__all__ = ["DEFAULT_PATH", "SIZES", "Measure", "SharedMemory", "runnable", "tune"]

SIZES = (64, 1 << 10, 1 << 14, 1 << 18, 1 << 22)
DEFAULT_PATH = "default"  # what the backend does if no algorithm is asked for

Measure = Callable[[str, str, int, int], float]

_WARM_UP = 2
_JOIN_SECONDS = 5.0


def runnable(collective: str) -> list[str]:
    """Names of the algorithms that real ranks can run for a collective."""
    return [e.name for e in list_algorithms() if e.collective == collective and not e.simulation_only]


def tune(
    measure: Measure,
    collectives: Sequence[str],
    ranks: int,
    sizes: Iterable[int] = SIZES,
    names: Sequence[str] | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Measured:
    """Measure each algorithm for each collective and size (bytes, as nccl-tests count; one size for a barrier).

    `names` restricts the algorithms. An algorithm that `measure` refuses with a UsageError does not fit and is left
    out. `on_row` is told of each result as it comes.
    """
    rows = []
    for collective in collectives:
        for nbytes in sorted(set(sizes)) if collective != "barrier" else [0]:
            for name in names or [DEFAULT_PATH, *runnable(collective)]:
                try:
                    row = Row(collective, ranks, name, nbytes, measure(collective, name, nbytes, ranks))
                except UsageError:
                    continue
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    return Measured(rows)


class SharedMemory:
    """N processes on this host in a group of the backend, started once, that measure on demand.

        with SharedMemory(4) as measure:
            seconds = measure("all_reduce", "ring", 1 << 20, 4)

    The time is the median of several calls on the slowest rank, in float32 on the CPU. Raises UsageError for another
    number of ranks or an algorithm that does not fit, PeerLostError if a process dies.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise UsageError(f"tune needs at least 1 rank, got {ranks}")
        self.ranks = ranks
        self._exit = ExitStack()
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []

    def __enter__(self) -> Self:
        folder = self._exit.enter_context(TemporaryDirectory(prefix="unisono-tune-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        self._exit.callback(self._stop)
        try:
            for rank in range(self.ranks):
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, self.ranks, folder), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)
            self._answers()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def __call__(self, collective: str, algorithm: str, nbytes: int, ranks: int) -> float:
        """Seconds of one call."""
        if ranks != self.ranks:
            raise UsageError(f"these are {self.ranks} ranks: start others to measure {ranks}")
        for pipe in self._pipes:
            pipe.send((collective, algorithm, nbytes))
        return max(float(answer) for answer in self._answers())

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv())
            except (EOFError, OSError):
                raise PeerLostError(f"rank {rank} of {self.ranks} died while measuring") from None
        for answer in answers:
            if isinstance(answer, UsageError):
                raise answer
            if isinstance(answer, str):
                raise UnisonoError(f"cannot measure: {answer}")
        return answers

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # which a rank takes as its end
        for process in self._processes:
            process.join(_JOIN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, rank: int, ranks: int, folder: str) -> None:
    """One rank: join the group, then measure whatever comes through the pipe until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("unisono", init_method=where, rank=rank, world_size=ranks)
    pipe.send(0.0)
    while True:
        try:
            collective, algorithm, nbytes = pipe.recv()
        except EOFError:
            return
        try:
            answer: object = _measured(collective, algorithm, nbytes)
        except UsageError as problem:
            answer = problem
        except Exception as problem:
            answer = f"{collective} by {algorithm}: {problem}"
        pipe.send(answer)


def _measured(collective: str, algorithm: str, nbytes: int) -> float:
    """The median of so many calls that they take a fraction of a second."""
    import torch.distributed as dist

    import unisono

    call = _call(collective, nbytes)
    times = []
    with unisono.algorithm(None if algorithm == DEFAULT_PATH else algorithm):
        for _ in range(_WARM_UP + max(3, min(30, (1 << 24) // max(nbytes, 1)))):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times[_WARM_UP:])


def _call(collective: str, nbytes: int) -> Callable[[], Any]:
    """One call of a collective on zeros, root 0; nbytes is rounded up to whole elements per rank."""
    import torch
    import torch.distributed as dist

    from unisono.torch_names import all_gather_single, reduce_scatter_single

    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    block = torch.zeros(-(-nbytes // (4 * ranks)))
    whole = torch.zeros(-(-nbytes // 4)) if collective in _VECTORS else torch.zeros(ranks * block.numel())
    other, blocks = torch.zeros_like(whole), list(whole.chunk(ranks)) if len(whole) else [block] * ranks
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "reduce_scatter": lambda: reduce_scatter_single(block, whole),
        "all_gather": lambda: all_gather_single(whole, block),
        "gather": lambda: dist.gather(block, blocks if first else None, 0),
        "scatter": lambda: dist.scatter(block, blocks if first else None, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "barrier": dist.barrier,
    }
    return calls[collective]


_VECTORS = frozenset({"all_reduce", "broadcast", "reduce"})
