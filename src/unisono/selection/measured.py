"""A table of measured times of this machine: kept between runs, looked up by size, stronger than any model.

The table lives in the user's cache directory ($XDG_CACHE_HOME or ~/.cache), one file per machine, as JSON.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import exp, log
from pathlib import Path

from unisono.errors import UsageError, file_errors
from unisono.schedule.topology_file import keep, kept_path

__all__ = ["BY_DEFAULT", "Measured", "Push", "Row", "table_path"]

_VERSION = 1
BY_DEFAULT = "default"
"""In place of an algorithm: what the backend does if none is asked for."""


@dataclass(frozen=True, order=True)
class Row:
    """One measurement: a collective over `ranks` ranks by an algorithm took `seconds` for `nbytes` bytes.

    ``device``: of the tensors, cpu or cuda.
    """

    collective: str
    ranks: int
    algorithm: str
    nbytes: int
    seconds: float
    device: str = "cpu"


@dataclass(frozen=True, order=True)
class Push:
    """One measurement: an update of whole tensors between ranks of this host took `seconds`.

    way: as `unisono.bench.weights` has it. tensors, nbytes: of the model.
    """

    way: str
    senders: int
    ranks: int
    tensors: int
    nbytes: int
    seconds: float


def table_path() -> Path:
    """The path of this machine's table."""
    return kept_path("tuned")


class Measured:
    """Rows, one per device, collective, ranks, algorithm and size at most, and pushes; the last one given counts.

    What is looked up is that of CPUs.
    """

    def __init__(self, rows: Iterable[Row] = (), pushes: Iterable[Push] = ()) -> None:
        self._rows = {(r.device, r.collective, r.ranks, r.algorithm, r.nbytes): r for r in rows}
        self._pushes = {astuple(p)[:-1]: p for p in pushes}

    @property
    def rows(self) -> list[Row]:
        """All rows, sorted."""
        return sorted(self._rows.values())

    @property
    def of_cpus(self) -> list[Row]:
        """The rows of CPUs, sorted."""
        return [row for row in self.rows if row.device == "cpu"]

    @property
    def pushes(self) -> list[Push]:
        """All updates of weights, sorted."""
        return sorted(self._pushes.values())

    def __len__(self) -> int:
        return len(self._rows) + len(self._pushes)

    def merged(self, newer: "Measured") -> "Measured":
        """Both tables; where they meet, the newer one counts."""
        return Measured([*self.rows, *newer.rows], [*self.pushes, *newer.pushes])

    def algorithms(self, collective: str, ranks: int) -> list[str]:
        """The measurements for so many ranks, sorted."""
        return sorted({r.algorithm for r in self.of_cpus if (r.collective, r.ranks) == (collective, ranks)})

    def seconds(self, collective: str, ranks: int, algorithm: str, nbytes: float) -> float:
        """The time for a size: between two measured sizes on the straight line between them in logarithms.

        Below the smallest size its time; beyond the largest, its time per byte. Raises KeyError if nothing was
        measured.
        """
        wanted = (collective, ranks, algorithm)
        points = [(r.nbytes, r.seconds) for r in self.of_cpus if (r.collective, r.ranks, r.algorithm) == wanted]
        if not points:
            raise KeyError(wanted)
        i = bisect_left([size for size, _ in points], nbytes)
        if i == len(points):
            size, time = points[-1]
            return time * nbytes / size if size else time
        if i == 0 or points[i][0] == nbytes:
            return points[i][1]
        (a, before), (b, after) = points[i - 1], points[i]
        share = log(max(nbytes, 1) / max(a, 1)) / log(b / max(a, 1)) if b > max(a, 1) else 1.0
        return exp(log(before) + share * (log(after) - log(before)))

    def save(self, path: Path | None = None) -> Path:
        """Write the table as a whole, or not at all. Raises UsageError if the file cannot be written."""
        rows = [
            [r.collective, r.ranks, r.algorithm, r.nbytes, r.seconds] + [r.device] * (r.device != "cpu")
            for r in self.rows
        ]
        pushes = [astuple(push) for push in self.pushes]
        text = json.dumps({"version": _VERSION, "rows": rows, "pushes": pushes}, indent=0)
        return keep(path or table_path(), text, "the measured table")

    @classmethod
    def load(cls, path: Path | None = None) -> "Measured":
        """The table that was kept, empty if there is none. Raises UsageError if the file is no such table."""
        path = path or table_path()
        with file_errors(f"read the measured table {path}"):
            try:
                text = path.read_bytes()
            except FileNotFoundError:
                return cls()
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']}")
            rows = [Row(str(c), int(n), str(a), int(s), _positive(t), *d) for c, n, a, s, t, *d in data["rows"]]
            pushes = [
                Push(str(way), int(senders), int(n), int(tensors), int(size), _positive(t))
                for way, senders, n, tensors, size, t in data.get("pushes", ())
            ]
            return cls(rows, pushes)
        except (ValueError, KeyError, TypeError) as problem:
            raise UsageError(f"{path} is no table of `unisono tune` ({problem}): delete it or measure again") from None


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{seconds} seconds")
    return float(seconds)
