"""Results of a measurement, as values and as JSON. Never imports torch."""

import json
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import unisono
from unisono.bench.settings import cores
from unisono.errors import UsageError, file_errors

__all__ = ["Machine", "Rates", "Result", "Row", "bound_nbytes", "middle_half", "spread", "this_machine"]

_FORMAT, _VERSION = "unisono bench", 1


@dataclass(frozen=True)
class Row:
    """One contender's calls of one collective at one size.

    ``seconds`` are the runs: mean seconds per call, on the slowest rank, of a block of ``iterations`` calls. ``count``
    is in elements, ``nbytes`` as nccl-tests count; ``wrong`` is None if not checked; ``bound`` in seconds.
    ``refused`` says why there are no times. ``requested``: bytes asked for, of which ``nbytes`` are whole elements.
    ``timing``: which of `settings.TIMINGS`.
    Of weight updates alone: ``check``, the checksum's share of the time, ``beyond``, bytes beyond the models, and
    ``predicted``, the seconds that the plan says.
    """

    collective: str
    contender: str
    nbytes: int
    count: int
    dtype: str
    op: str
    place: str
    ranks: int
    iterations: int = 0
    seconds: tuple[float, ...] = ()
    wrong: int | None = None
    factor: float = 1.0
    bound: float = 0.0
    limit: str = ""
    refused: str = ""
    requested: int = 0
    check: float = 0.0
    beyond: int = 0
    predicted: float = 0.0
    device: str = "cpu"
    timing: str = "eager"

    @property
    def time(self) -> float:
        """Seconds per call: the median of the runs; infinite if there are none."""
        return median(self.seconds) if self.seconds else float("inf")

    @property
    def algbw(self) -> float:
        """Bytes per second: size by time; 0 where the time is that of the host, which does not wait for its GPU."""
        return 0.0 if self.of_host else self.nbytes / self.time

    @property
    def of_host(self) -> bool:
        """True if the time is that of a host which hands the call to its GPU."""
        return self.device != "cpu" and self.timing in ("eager", "async")

    @property
    def busbw(self) -> float:
        """Bytes per second, comparable with the rate of the wire."""
        return self.algbw * self.factor

    @property
    def share_of_bound(self) -> float:
        """The time of the bound as a share of the time taken: 1 is as fast as the machine allows."""
        return self.bound / self.time


def middle_half(seconds: Sequence[float]) -> tuple[float, float]:
    """The first and the last of the runs that are the middle half."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]


def spread(seconds: Sequence[float]) -> float:
    """Half the range of the middle half of the runs, as a share of their median."""
    low, high = middle_half(seconds)
    return (high - low) / 2 / median(seconds)


@dataclass(frozen=True)
class Rates:
    """Bytes per second at sizes: what each rank copies, and reduces, while all ranks do the same."""

    sizes: tuple[int, ...] = ()
    copy: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()

    def copies(self, nbytes: float) -> float:
        """The rate of copying buffers of ``nbytes``; between measured sizes on a line in logarithms."""
        return self._at(self.copy, nbytes)

    def bound(self, collective: str, nbytes: int, ranks: int, place: str) -> float:
        """Seconds in which all ranks together read and write what must be, as fast as they copy such buffers.

        0 where no rates were measured.
        """
        if not self.sizes:
            return 0.0
        return bound_nbytes(collective, nbytes, ranks, place) / 2 / ranks / self.copies(nbytes)

    def reduces(self, nbytes: float) -> float:
        """The rate at which buffers of ``nbytes`` are reduced into others."""
        return self._at(self.reduce, nbytes)

    def _at(self, rates: Sequence[float], nbytes: float) -> float:
        return float(np.exp(np.interp(np.log(max(nbytes, 1)), np.log(self.sizes), np.log(rates))))


def bound_nbytes(collective: str, nbytes: int, ranks: int, place: str) -> float:
    """Bytes read plus bytes written, of all ranks together, that no algorithm can do without.

    Each input byte is read once at least, each output byte written once. In place, what already lies where it belongs
    counts for nothing.
    """
    if ranks == 1 and place == "in":
        return 0.0
    block, everywhere = nbytes / ranks, ranks * nbytes
    others = nbytes - block
    if collective in ("all_reduce", "all_to_all", "send_recv"):
        return 2.0 * everywhere
    if collective == "reduce":
        return everywhere + nbytes
    if collective == "broadcast":
        return float(nbytes + everywhere - (nbytes if place == "in" else 0))
    if collective == "reduce_scatter":
        return float(everywhere + nbytes)
    if collective == "all_gather":
        return nbytes + ranks * (others if place == "in" else nbytes)
    return 2.0 * nbytes if collective in ("gather", "scatter") else 0.0


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement. ``mpi``: the MPI library, where it is a contender; ``gpu``: the GPUs, if used."""

    host: str = ""
    cpu: str = ""
    cores: int = 0
    system: str = ""
    python: str = ""
    torch: str = ""
    unisono: str = ""
    load: float = 0.0
    mpi: str = ""
    gpu: str = ""

    def words(self) -> str:
        """In one line."""
        plural = "s" * (self.cores != 1)
        return (
            f"{self.cores} core{plural}, {self.cpu}, {self.system}, Python {self.python}, torch {self.torch}, "
            f"unisono {self.unisono}" + "".join(f", {more}" for more in (self.mpi, self.gpu) if more)
        )


def this_machine(mpi: str = "", gpu: str = "") -> Machine:
    """The machine and the versions here; the MPI library and the GPUs are found elsewhere."""
    return Machine(
        host=socket.gethostname(),
        cpu=_cpu(),
        cores=len(cores()),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=version("torch"),
        unisono=unisono.__version__,
        load=os.getloadavg()[0],
        mpi=mpi,
        gpu=gpu,
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.machine()


@dataclass
class Result:
    """A whole run: rows in the order in which they were measured."""

    settings: dict[str, Any]
    machine: Machine
    rates: Rates = field(default_factory=Rates)
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    command: str = field(default_factory=lambda: " ".join(["unisono", *sys.argv[1:]]))

    @property
    def contenders(self) -> list[str]:
        """Names, the subject first."""
        return list(dict.fromkeys(row.contender for row in self.rows))

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """The collectives and timings that were measured, in their order."""
        return list(dict.fromkeys((row.collective, row.timing) for row in self.rows if row.seconds))

    def of(self, collective: str, contender: str, timing: str = "eager") -> list[Row]:
        """The measured rows of one curve, by size."""
        wanted = collective, contender, timing
        found = [r for r in self.rows if (r.collective, r.contender, r.timing) == wanted and r.seconds]
        return sorted(found, key=lambda row: row.nbytes)

    def save(self, path: Path) -> None:
        """Write JSON; raises UsageError if the file cannot be written."""
        data = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        with file_errors(f"write {path}"):
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Reads a result of `save`; raises UsageError if there is no such file, or it is something else."""
        with file_errors(f"read {path}"):
            text = path.read_bytes()
        try:
            data = json.loads(text)
            if (data["format"], data["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"format {data['format']!r}, version {data['version']}")
            rates = Rates(**{name: tuple(values) for name, values in data["rates"].items()})
            rows = [_row(row) for row in data["rows"]]
            return cls(
                data["settings"], Machine(**data["machine"]), rates, rows, bool(data["complete"]), str(data["command"])
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise UsageError(f"{path} is no result of `unisono bench --json` ({problem})") from None


def _row(data: dict[str, Any]) -> Row:
    seconds = tuple(float(x) for x in data["seconds"])
    if any(not x > 0 for x in seconds):
        raise ValueError(f"seconds {min(seconds)}")
    return Row(**{**data, "seconds": seconds})
