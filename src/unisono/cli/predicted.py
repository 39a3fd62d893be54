"""Predicted beside measured over shared memory: three costs fitted to two algorithms tell the times of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from unisono.algorithms import names
from unisono.bench.result import Row as BenchRow
from unisono.cli.programs import tables_of
from unisono.schedule import Link, Memory, Topology, as_hosts, joined
from unisono.schedule.topology_file import load_topology, topology_path
from unisono.selection import BY_DEFAULT, Measured, Row
from unisono.simulation import Effort, effort, fit_memory
from unisono.transport.process import cores
from unisono.units import show_nbytes, show_seconds

__all__ = ["Predicted", "by_size", "predicted_lines"]

_MOST_RANKS = 16
_FEWEST_CALLS = 3


@dataclass(frozen=True)
class Predicted:
    """Rows with the effort of their calls; ``fitted``: the algorithms that the costs were fitted to."""

    rows: Sequence[tuple[Row, Effort]]
    memory: Memory
    fitted: tuple[str, ...]
    ranks: int

    @classmethod
    def of(cls, measured: Measured, ranks: int) -> "Predicted | None":
        """The prediction; None where too little was measured, or there are more ranks than is quickly counted."""
        if ranks > _MOST_RANKS or ranks < 2:
            return None
        here = min(cores(), ranks)
        rows = [
            (row, effort(tables_of(row.algorithm, row.collective, row.nbytes, ranks), row.nbytes, here))
            for row in measured.rows
        ]
        by_size = sorted(rows, key=lambda each: -each[0].nbytes)
        meetings = {row.algorithm: work.meetings for row, work in by_size}  # of the smallest size
        ends = sorted(meetings.keys() - {BY_DEFAULT}, key=lambda name: (meetings[name], name))
        fitted = tuple(dict.fromkeys((ends[0], ends[-1]))) if ends else ()
        known = [(work, row.seconds) for row, work in rows if row.algorithm in fitted]
        if len(known) < _FEWEST_CALLS:
            return None
        return cls(rows, fit_memory(known, here), fitted, ranks)

    @property
    def topology(self) -> Topology:
        """This host, as measured."""
        link = Link("shared_memory", self.memory.meeting, self.memory.copy)
        return joined(as_hosts(1, self.ranks), link, gamma=self.memory.copy, memory=self.memory)

    def table(self, collective: str) -> Table:
        """The predicted times of a collective, and how far each is from what was measured."""
        mine = {(row.algorithm, row.nbytes): (row, work) for row, work in self.rows if row.collective == collective}
        cells = {key: self._cell(*each) for key, each in mine.items()}
        return by_size(f"{collective} over {self.ranks} ranks, predicted", collective, cells)

    def _cell(self, row: Row, work: Effort) -> str:
        seconds = work.seconds(self.memory)
        return f"{show_seconds(seconds)} {seconds / row.seconds - 1:+.0%}"

    def lines(self) -> list[str]:
        """The costs, and the error."""
        m = self.memory
        rate = " and ".join(f"{1e-9 / cost:.3g}" for cost in dict.fromkeys((m.copy, m.cold or m.copy)) if cost)
        errors = [abs(work.seconds(m) / row.seconds - 1) for row, work in self.rows]
        return [
            f"Fitted to {' and '.join(self.fitted)}: a call {show_seconds(m.call)}, a meeting "
            f"{show_seconds(m.meeting)}, bytes at {rate or 'any'} GB/s.",
            f"Predicted with a median error of {median(errors):.0%}.",
        ]


def by_size(title: str, collective: str, cells: Mapping[tuple[str, int], str], down: bool = False) -> Table:
    """A table with a row per algorithm and a column per size; ``down``: the other way round, for many sizes."""
    sizes = sorted({size for _, size in cells})
    table = Table(title=title, title_justify="left")
    table.add_column("size" if down else "algorithm", no_wrap=True)
    if down:
        known = list(dict.fromkeys(name for name, _ in cells))
        for name in known:
            table.add_column(name, justify="right", no_wrap=True)
        for size in sizes:
            table.add_row(show_nbytes(size), *(cells.get((name, size), "-") for name in known))
        return table
    for size in sizes:
        table.add_column(show_nbytes(size) if collective != "barrier" else "time", justify="right")
    for name in dict.fromkeys(name for name, _ in cells):
        table.add_row(name, *(cells.get((name, size), "-") for size in sizes))
    return table


def predicted_lines(rows: Sequence[BenchRow], ranks: int) -> list[str]:
    """Of each collective that unisono made by a schedule: predicted times beside the bench's, and how far they are.

    By the costs that `unisono tune` kept for as many ranks; no lines where there are none.
    """
    memory = _kept(ranks)
    found: dict[tuple[str, str], list[tuple[BenchRow, float]]] = {}
    for row in rows:
        if memory is None:
            break
        backend, _, algorithm = row.contender.partition(":")
        if backend == "unisono" and algorithm in ("", *names(row.collective)) and row.seconds:
            work = effort(
                tables_of(algorithm or BY_DEFAULT, row.collective, row.nbytes, ranks), row.nbytes, memory.cores
            )
            found.setdefault((row.collective, row.contender), []).append((row, work.seconds(memory)))
    lines = []
    for (collective, contender), pairs in found.items():
        words = [f"{show_nbytes(row.nbytes)} {show_seconds(time)} {time / row.time - 1:+.0%}" for row, time in pairs]
        error = median(abs(time / row.time - 1) for row, time in pairs)
        lines.append(f"# predicted {collective} of {contender}: {', '.join(words)}; median error {error:.0%}")
    return lines


def _kept(ranks: int) -> Memory | None:
    """The costs kept on this machine for as many ranks, if there are any."""
    if not topology_path().exists() or not 1 < ranks <= _MOST_RANKS:
        return None
    topology = load_topology()
    return topology.memory if (topology.hosts, topology.world_size) == (1, ranks) else None
