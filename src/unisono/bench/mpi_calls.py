"""Calls through mpi4py: a C library's MPI on the very buffers of the other contenders, nothing pickled.

An argument is a triple of buffer, count and datatype, made once per case, so that a call is one call of mpi4py's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from unisono.bench.cases import Case
from unisono.bench.settings import MPI_DTYPES, MPI_OPS, Settings
from unisono.errors import UsageError, first_line

__all__ = ["MpiCaller", "mpi_caller"]


class MpiCaller:
    """Makes its calls in ``mpi``'s COMM_WORLD, as `TorchCaller` in a group; ``mpi`` is the module mpi4py.MPI."""

    def __init__(self, mpi: Any, settings: Settings) -> None:
        self.mpi, self.comm = mpi, mpi.COMM_WORLD
        self._type = getattr(mpi, MPI_DTYPES[settings.dtype])
        bits, logical = MPI_OPS.get(settings.op, ("", ""))  # none for calls that reduce nothing
        self._op = getattr(mpi, logical if settings.dtype == "bool" else bits, None)

    def call(self, case: Case, asynchronous: bool, way: str = "") -> Callable[[], Any]:
        """A function that makes one call and is back when it is done."""
        name, *arguments = self._call(case)
        if asynchronous and case.collective != "send_recv":
            start = partial(getattr(self.comm, f"I{name.lower()}"), *arguments)

            def make() -> None:
                start().Wait()
        else:
            make = partial(getattr(self.comm, name), *arguments)
        return case.on_copy(make) if case.collective == "broadcast" else make

    def output(self, case: Case) -> torch.Tensor:
        """The tensor of the result; that of reduce_scatter in place where MPI leaves it, in front of the input."""
        return case.input[: case.count] if (case.collective, case.place) == ("reduce_scatter", "in") else case.output

    def barrier(self) -> None:
        """No rank is back before all have come."""
        self.comm.Barrier()

    def all_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks, in rank order: ``[ranks * n]`` for ``[n]``."""
        found = numbers.new_empty(self.comm.size * len(numbers))
        self.comm.Allgather(numbers.numpy(), found.numpy())
        return found

    def _call(self, case: Case) -> list[Any]:
        """The name of the method and its arguments."""
        x, y = (
            (self.mpi.buffer.frombuffer(part.numpy()), case.count, self._type) for part in (case.input, case.output)
        )
        root, op = case.root, self._op
        at_root, here = case.rank == root, self.mpi.IN_PLACE if case.place == "in" else x
        after, before = (case.rank + 1) % self.comm.size, (case.rank - 1) % self.comm.size
        into = x if case.place == "in" else y
        calls: dict[str, list[Any]] = {
            "all_reduce": ["Allreduce", here, y, op],
            "broadcast": ["Bcast", y, root],
            "reduce": ["Reduce", here if at_root else x, y if at_root else None, op, root],
            "reduce_scatter": ["Reduce_scatter_block", here, into, op],
            "all_gather": ["Allgather", here, y],
            "all_to_all": ["Alltoall", x, y],
            "gather": ["Gather", x, y if at_root else None, root],
            "scatter": ["Scatter", x if at_root else None, y, root],
            "barrier": ["Barrier"],
            "send_recv": ["Sendrecv", x, after, 0, y, before, 0],
        }
        return calls[case.collective]


@contextmanager
def mpi_caller(settings: Settings, rank: int) -> Iterator[MpiCaller]:
    """Join the ranks that mpiexec has started. Raises UsageError if mpi4py and mpiexec are not of one MPI."""
    mpi = _load()
    comm = mpi.COMM_WORLD
    if (comm.rank, comm.size) != (rank, settings.ranks):
        library = mpi.Get_library_version().partition("\n")[0].strip()
        raise UsageError(
            f"mpiexec started rank {rank} of {settings.ranks}, but {library}, which mpi4py has loaded, says rank "
            f"{comm.rank} of {comm.size}: they belong to different MPIs; leave one of them installed"
        )
    yield MpiCaller(mpi, settings)
    mpi.Finalize()  # which waits for all ranks, so not after an error


def _load() -> Any:
    """mpi4py.MPI, initialized for calls from this thread alone, which MPI need not guard by locks."""
    import mpi4py

    mpi4py.rc(thread_level="funneled", finalize=False)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = first_line(error)
        raise UsageError(f'mpi4py finds no MPI library ({reason}): pip install "unisono[bench]"') from error
    return MPI
