"""A table of measured times of this machine: kept between runs, looked up by size, stronger than any model.

The table lives in the user's cache directory ($XDG_CACHE_HOME or ~/.cache), one file per machine, as JSON.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from unisono.errors import UsageError, file_errors
from unisono.schedule import Link, Topology
from unisono.schedule.topology_file import keep, kept_path

__all__ = ["BY_DEFAULT", "Measured", "Row", "table_path"]

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


def table_path() -> Path:
    """The path of this machine's table."""
    return kept_path("tuned")


class Measured:
    """Rows, at most one per device, collective, ranks, algorithm and size (the last one given counts).

    What is looked up is that of CPUs.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = {(r.device, r.collective, r.ranks, r.algorithm, r.nbytes): r for r in rows}

    @property
    def rows(self) -> list[Row]:
        """All rows, sorted."""
        return sorted(self._rows.values())

    @property
    def of_cpus(self) -> list[Row]:
        """The rows of CPUs, sorted."""
        return [row for row in self.rows if row.device == "cpu"]

    def __len__(self) -> int:
        return len(self._rows)

    def merged(self, newer: "Measured") -> "Measured":
        """Both tables; where they meet, the newer one counts."""
        return Measured([*self.rows, *newer.rows])

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

    def shared_memory(self, world_size: int) -> Topology | None:
        """What joins so many ranks of this host, from the broadcasts measured here; None if none were.

        alpha is the time of the smallest, beta what each byte of the largest adds, of as many ranks, or of the next
        number that was measured. A broadcast's readers share no port: they read the root's memory side by side.
        """
        rows = [r for r in self.of_cpus if (r.collective, r.algorithm) == ("broadcast", BY_DEFAULT) and r.ranks > 1]
        if not rows:
            return None
        ranks = min({r.ranks for r in rows}, key=lambda count: (abs(count - world_size), count))
        rows = [r for r in rows if r.ranks == ranks]
        small, large = rows[0], rows[-1]
        beta = max(large.seconds - small.seconds, 0.0) / max(large.nbytes - small.nbytes, 1)
        link = Link("shared_memory", small.seconds, beta or large.seconds / large.nbytes, switched=False)
        return Topology("shared_memory, measured", 1, world_size, link, gamma=beta)

    def save(self, path: Path | None = None) -> Path:
        """Write the table as a whole, or not at all. Raises UsageError if the file cannot be written."""
        rows = [
            [r.collective, r.ranks, r.algorithm, r.nbytes, r.seconds] + [r.device] * (r.device != "cpu")
            for r in self.rows
        ]
        text = json.dumps({"version": _VERSION, "rows": rows}, indent=0)
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
            return cls(Row(str(c), int(n), str(a), int(s), _positive(t), *d) for c, n, a, s, t, *d in data["rows"])
        except (ValueError, KeyError, TypeError) as problem:
            raise UsageError(f"{path} is no table of `unisono tune` ({problem}): delete it or measure again") from None


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{seconds} seconds")
    return float(seconds)
