"""Settings of a measurement: plain values that travel between processes. Never imports torch."""

import math
import os
from dataclasses import dataclass

from unisono.algorithms import names
from unisono.errors import UsageError, check_known
from unisono.launch import MOST_RANKS
from unisono.runtime import header
from unisono.units import show_nbytes

__all__ = [
    "BACKENDS",
    "COLLECTIVES",
    "DEVICES",
    "DTYPES",
    "IN_PLACE",
    "MEMORIES",
    "MPI_DTYPES",
    "MPI_OPS",
    "OPS",
    "PERSISTENT",
    "PLACES",
    "REDUCING",
    "SYMM_MEM_WAYS",
    "TIMINGS",
    "VECTORS",
    "Contender",
    "Settings",
    "block_count",
    "cores",
]

COLLECTIVES = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
    "send_recv",
)  # fmt: skip
VECTORS = frozenset({"all_reduce", "broadcast", "reduce", "send_recv"})
"""Collectives whose size is the vector's, as in nccl-tests (doc/PERFORMANCE.md there); of others all ranks' blocks'."""
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})
"""Collectives whose output may be (part of) their input."""
_ALWAYS_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
DTYPES = {name: size for name, size in header.DTYPES.items() if name not in ("complex32", "float8_e8m0fnu")}
"""Names as torch has them, with the bytes of an element; not those of which torch, or small numbers, know little."""
PLACES = ("in", "out")
MEMORIES = ("ordinary", "shared")
BACKENDS = {"cpu": ("unisono", "gloo", "mpi"), "cuda": ("unisono", "nccl", "symm_mem")}
"""The contenders by device; symm_mem: operations of torch's symmetric memory (`SYMM_MEM_WAYS`)."""
DEVICES = tuple(BACKENDS)
TIMINGS = ("graph", "between", "eager", "async")
"""What is timed on GPUs: replays of CUDA graphs, calls back to back; the same with a small kernel after each call, less
those kernels; the host's time of eager calls; the same with async_op=True, then wait. On CPUs: eager."""
SYMM_MEM_WAYS = ("one_shot", "two_shot")
PERSISTENT = "persistent"
"""In an algorithm's place: the call is prepared once (`unisono.prepare`) and made without torch's wrapper."""
MPI_DTYPES = {
    "uint8": "UINT8_T", "uint16": "UINT16_T", "uint32": "UINT32_T", "uint64": "UINT64_T", "int8": "INT8_T",
    "int16": "INT16_T", "int32": "INT32_T", "int64": "INT64_T", "float32": "FLOAT", "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX", "complex128": "C_DOUBLE_COMPLEX", "bool": "C_BOOL",
}  # fmt: skip
"""MPI's names of the dtypes that it has."""
MPI_OPS = {
    "sum": ("SUM", "LOR"), "product": ("PROD", "LAND"), "min": ("MIN", "LAND"), "max": ("MAX", "LOR"),
    "band": ("BAND", "LAND"), "bor": ("BOR", "LOR"), "bxor": ("BXOR", "LXOR"),
}  # fmt: skip
"""MPI's names of the ops that it has: on numbers, and on bools, which MPI gives the logical ones alone."""


@dataclass(frozen=True)
class Contender:
    """One way of making the calls: a backend and, on unisono, an algorithm (empty: what it does by itself)."""

    backend: str
    algorithm: str = ""

    @property
    def name(self) -> str:
        """As tables and files call it: ``gloo``, ``unisono``, ``unisono:ring``."""
        return f"{self.backend}:{self.algorithm}" if self.algorithm else self.backend


@dataclass(frozen=True)
class Settings:
    """One run of the bench, the same on all ranks. Sizes are in bytes, as nccl-tests count them (`VECTORS`).

    ``device``: of the tensors, a GPU of its own for each rank. ``timings``: of `TIMINGS`, one after the other.
    ``listed``: these sizes, instead of those from ``least`` to ``most``. ``place``: ``in``, ``out``, or empty for the
    form that torch's call has. ``memory``: tensors are ``ordinary`` or ``shared`` (`unisono.empty`). ``seconds`` is
    about what a run over all sizes of one collective shall take; slow calls take longer, for each is measured ``runs``
    times at least. ``left_out``: collectives that "all" means, but that have no form for ``place``.
    """

    collectives: tuple[str, ...] = ("all_reduce",)
    ranks: int = 2
    least: int = 8
    most: int = 256 << 20
    factor: float = 2.0
    listed: tuple[int, ...] = ()
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    place: str = ""
    contenders: tuple[Contender, ...] = (Contender("unisono"),)
    asynchronous: bool = False
    memory: str = "ordinary"
    pin: bool = False
    runs: int = 7
    warm_up: int = 2
    seconds: float = 20.0
    check: bool = True
    left_out: tuple[str, ...] = ()
    device: str = "cpu"
    timings: tuple[str, ...] = ("eager",)

    def validate(self) -> None:
        """Raise UsageError, one line, for the first value that cannot be measured."""
        if os.environ.get("UNISONO_REPLACES") and any(each.backend == "gloo" for each in self.contenders):
            raise UsageError("UNISONO_REPLACES is set, so that nothing here could measure Gloo: unset it")
        for name in self.collectives:
            check_known("collective", name, (*COLLECTIVES, "all"))
        check_known("--op", self.op, OPS)
        check_known("--dtype", self.dtype, DTYPES)
        check_known("--memory", self.memory, MEMORIES)
        whole = "float" not in self.dtype and "complex" not in self.dtype
        if self.op in ("band", "bor", "bxor") and not whole:
            raise UsageError(f"--op {self.op} is for whole numbers: choose a --dtype such as int32, not {self.dtype}")
        if self.op == "avg" and self.dtype == "bool":
            raise UsageError("--op avg is for numbers: choose a --dtype such as float32, not bool")
        if self.op == "premul_sum" and whole:
            raise UsageError(f"--op premul_sum is for floating point: choose a --dtype like float32, not {self.dtype}")
        if self.op in ("min", "max") and "complex" in self.dtype:
            raise UsageError(f"--op {self.op} is for numbers with an order: choose a --dtype other than {self.dtype}")
        if self.ranks < 1:
            raise UsageError(f"--ranks is {self.ranks}, expected 1 or more")
        if self.ranks > MOST_RANKS:
            raise UsageError(f"--ranks is {self.ranks}, expected at most {MOST_RANKS} processes of this host")
        if self.ranks > 64 and self.check:
            raise UsageError(f"--ranks is {self.ranks}, expected at most 64: results are checked with exact sums")
        if not 0 <= self.root < self.ranks:
            raise UsageError(f"--root is {self.root}, expected a rank from 0 to {self.ranks - 1}")
        for name, value, least in (("runs", self.runs, 1), ("warm-up", self.warm_up, 0)):
            if value < least:
                raise UsageError(f"--{name} is {value}, expected {least} or more")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds is {self.seconds:g}, expected a positive number")
        self._validate_sizes()
        self._validate_device()
        self._validate_contenders()

    def _validate_device(self) -> None:
        """Raise UsageError for a device that is none, and for what it has not."""
        check_known("--device", self.device, DEVICES)
        for timing in self.timings:
            check_known("--timing", timing, TIMINGS)
        if self.device == "cpu":
            if self.timings != ("eager",):
                raise UsageError(f"--timing {','.join(self.timings)} is of GPUs: give --device cuda as well")
            return
        if "barrier" in self.collectives:
            raise UsageError("barrier is of processes, and does not wait for GPUs: leave it out with --device cuda")
        if self.memory != "ordinary":
            raise UsageError(f"--memory {self.memory} is memory of the host: leave it out with --device cuda")
        if self.asynchronous:
            raise UsageError("--async is of CPUs: on GPUs give --timing async")

    def _validate_sizes(self) -> None:
        if self.listed and min(self.listed) < 1:
            raise UsageError(f"--bytes lists {show_nbytes(min(self.listed))}, expected sizes of 1 byte or more")
        if self.least < 1 or self.most < self.least:
            raise UsageError(
                f"sizes from {show_nbytes(self.least)} to {show_nbytes(self.most)}: expected -b of 1 byte or more, "
                "and -e not below it"
            )
        if not 1 < self.factor < math.inf:
            raise UsageError(f"-f is {self.factor:g}, expected a factor above 1 from one size to the next")

    def _validate_contenders(self) -> None:
        if self.place:
            check_known("place", self.place, PLACES)
        for collective in self.collectives if self.place == "in" else ():
            if collective not in IN_PLACE:
                able = ", ".join(name for name in COLLECTIVES if name in IN_PLACE)
                raise UsageError(f"{collective} has no in-place form: those that have one are {able}")
        found = [contender.name for contender in self.contenders]
        if len(set(found)) < len(found):
            raise UsageError(f"the contenders are {', '.join(found)}: name each one once")
        for contender in self.contenders:
            known, backend = BACKENDS[self.device], contender.backend
            if backend not in known and any(backend in each for each in BACKENDS.values()):
                words = f"{backend} is not measured on tensors of --device {self.device}"
                raise UsageError(f"{words}: expected one of {', '.join(known)}")
            check_known("backend", backend, known)
            if contender.algorithm:
                calls = (*names(), *[PERSISTENT] * (self.device == "cpu"))
                ways = SYMM_MEM_WAYS if backend == "symm_mem" else calls
                check_known("algorithm", contender.algorithm, ways)
        if self.by_mpiexec:
            self._validate_mpi()

    def _validate_mpi(self) -> None:
        """Raise UsageError for what MPI has no word for."""
        reduces = any(name in REDUCING for name in self.collectives)
        for option, value, known in (("dtype", self.dtype, MPI_DTYPES), ("op", self.op, MPI_OPS)):
            if value not in known and (option == "dtype" or reduces):
                raise UsageError(f"mpi has no --{option} {value}: those that it has are {', '.join(known)}")

    def sizes(self, collective: str) -> list[int]:
        """Bytes from ``least`` to ``most``, each ``factor`` times the one before; a barrier has one size, 0."""
        if collective == "barrier":
            return [0]
        if self.listed:
            return sorted(set(self.listed))
        sizes, size = [], float(self.least)
        while round(size) <= self.most:
            sizes.append(round(size))
            size *= self.factor
        return list(dict.fromkeys(sizes))

    @property
    def by_mpiexec(self) -> bool:
        """True if MPI is among the contenders, so that mpiexec must start the ranks."""
        return any(contender.backend == "mpi" for contender in self.contenders)

    @property
    def largest(self) -> int:
        """The largest size, in bytes."""
        return max(self.listed, default=self.most)

    def place_of(self, collective: str) -> str:
        """``in`` or ``out``, as asked for, or as torch's call has it."""
        return self.place or ("in" if collective in _ALWAYS_IN_PLACE else "out")

    def pins(self) -> list[int]:
        """The core of each rank, or nothing if ranks are not to be pinned or do not fit."""
        free = cores()
        return free[: self.ranks] if self.pin and self.ranks <= len(free) else []


def cores() -> list[int]:
    """The cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def block_count(collective: str, nbytes: int, itemsize: int, ranks: int) -> int:
    """Elements that a call is given for a size of about ``nbytes``: rounded down, but at least one; 0 for a barrier."""
    if collective == "barrier":
        return 0
    return max(1, nbytes // (itemsize * (1 if collective in VECTORS else ranks)))
