"""What weight updates cost: cases, contenders and their table. Never imports torch.

Contenders take turns in the same processes: `weights` (a push and its pulls), `unchecked` (the same without checksums),
`flat` (one broadcast of as many bytes on unisono) and `gloo` (a broadcast per tensor). The bound is the bytes that must
be read and written at the rate at which the ranks copy. Of an update's time, *check* is what checksums add, *wait* what
an update of one element takes, *copy* what the flat broadcast takes, and *pack* the rest.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.bench.result import Machine, Result, Row, spread
from unisono.drawing.drawing import save_figure
from unisono.errors import UsageError, check_known
from unisono.launch import local_ranks
from unisono.selection import Measured
from unisono.units import show_nbytes, show_ranks

__all__ = [
    "AGAINST",
    "Case",
    "WeightSettings",
    "header",
    "launch_weights",
    "line",
    "parse_pairs",
    "save_weights_plot",
]

_RATIOS = {"flat": "× flat", "gloo": "gloo ×"}
AGAINST = tuple(_RATIOS)
_COLOURS = {"weights": "#1f5fbf", "unchecked": "#a03fb0", "flat": "#2a9d5c", "gloo": "#d95f02"}


@dataclass(frozen=True)
class Case:
    """``count`` tensors of ``elements`` floats from ``senders`` ranks to ``replicas``, or to one of so many ranks.

    way: ``update``; ``shared``, ``mapped``: as `unisono.weights` has it; ``delta``: ``changed`` of the tensors change
    between two pushes; ``reshard``: from rows to columns.
    """

    count: int
    elements: int
    senders: int
    replicas: int
    way: str = "update"
    changed: int = 0

    @property
    def name(self) -> str:
        """As tables have it: ``300x28000 to 3, mapped``."""
        if self.way == "reshard":
            return f"{self.count}x{self.elements} {self.senders}:{self.replicas}"
        ways = {"update": "", "delta": f", {self.changed} changed"}
        return f"{self.count}x{self.elements} to {self.replicas}{ways.get(self.way, f', {self.way}')}"

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self.senders + self.replicas

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return 4 * self.count * self.elements

    @property
    def touched(self) -> int:
        """Bytes that must be read and written, of all ranks together."""
        if self.way == "delta":
            return 4 * self.changed * self.elements * (1 + self.replicas)
        return self.nbytes * (2 if self.way in ("mapped", "reshard") else 1 + self.replicas)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a tensor: as near a square as the number of its elements allows."""
        rows = max(rows for rows in range(1, math.isqrt(self.elements) + 1) if self.elements % rows == 0)
        return rows, self.elements // rows


@dataclass(frozen=True)
class WeightSettings:
    """One run, the same on all ranks.

    ``delta``: the share of tensors that change; below 0: no such case. ``tuned``: what plans predict by, if anything.
    ``parts``: measure what an update's time is made of, too; else other data is written between updates, as is where
    contenders take turns.
    """

    tensors: tuple[tuple[int, int], ...] = ((300, 28000), (3000, 100))
    replicas: tuple[int, ...] = (1, 3, 7)
    share: bool = False
    mapped: bool = False
    delta: float = -1.0
    against: tuple[str, ...] = AGAINST
    reshard: tuple[tuple[int, int], ...] = ()
    runs: int = 7
    seconds: float = 4.0
    tuned: Measured | None = None
    parts: bool = True

    def validate(self) -> None:
        """Raise UsageError, one line, for the first value that cannot be measured."""
        for name in self.against:
            check_known("contender of --against", name, AGAINST)
        if not self.tensors or min(min(pair) for pair in self.tensors) < 1:
            raise UsageError("--tensors needs counts and elements of 1 or more, such as 300x28000,3000x100")
        if not self.replicas or min(self.replicas) < 1 or max(self.replicas) > 63:
            raise UsageError(f"--replicas is {list(self.replicas)}, expected numbers from 1 to 63, such as 1,3,7")
        if self.runs < 1:
            raise UsageError(f"--runs is {self.runs}, expected 1 or more")
        if self.delta > 1:
            raise UsageError(f"--delta is {100 * self.delta:g}%, expected a share of the tensors, such as 1%")

    @property
    def cases(self) -> list[Case]:
        """In the order in which they are measured."""
        found = []
        for count, elements in self.tensors:
            ways = ["update"] + ["shared"] * self.share + ["mapped"] * self.mapped
            found += [Case(count, elements, 1, n, way) for way in ways for n in self.replicas]
            if self.delta >= 0:
                changed = dict.fromkeys((round(count * self.delta), 0))
                found += [Case(count, elements, 1, n, "delta", some) for some in changed for n in self.replicas]
            found += [Case(count, elements, senders, n, "reshard") for senders, n in self.reshard]
        return found

    @property
    def ranks(self) -> int:
        """The largest world of a case."""
        return max(case.ranks for case in self.cases)

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names, the subject first."""
        return ("weights", *(("unchecked",) if self.parts else ()), *self.against)


def parse_pairs(option: str, text: str, between: str, example: str) -> tuple[tuple[int, int], ...]:
    """Two numbers each, as ``300x28000,3000x100`` has them around an ``x``. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found = [re.fullmatch(rf"([1-9]\d*){between}([1-9]\d*)", part) for part in parts]
    if None in found:
        raise UsageError(f"{option} is {text!r}, expected a list such as {example}")
    return tuple((int(match[1]), int(match[2])) for match in found if match)


def launch_weights(settings: WeightSettings, report: Callable[[Row], None]) -> None:
    """Measure on new processes of this host; ``report`` gets the rows as they come. Raises as `launch` does."""
    settings = replace(settings, tuned=Measured.load())
    with local_ranks("unisono.bench.weights_rank:rank_main", settings.ranks, settings) as ranks:
        for row in ranks.messages():
            report(row)


def header(settings: WeightSettings, machine: Machine) -> list[str]:
    """What is measured where, and the names of columns."""
    rivals = "".join(f"{_RATIOS[name]:>9}" for name in settings.against)
    return [
        f"# up to {show_ranks(settings.ranks)}, pinned over {machine.cores} cores; median of up to {settings.runs}",
        f"# {machine.words()}",
        f"#{'case':>28}{'size':>10}{'ms':>9}{'±':>5}{'predicted':>12}{rivals}{'bound':>7}{'limit':>7}{'check':>7}{'beyond':>10}",
    ]


def line(settings: WeightSettings, rows: Sequence[Row]) -> str:
    """One case: the predicted time, ours by the flat broadcast's, Gloo's by ours, shares, memory beyond models."""
    mine, by = rows[0], {row.contender: row for row in rows}
    head = f" {mine.collective:>28}{show_nbytes(mine.nbytes):>10}"
    if mine.refused:
        return f"{head}  refused: {mine.refused}"
    text = f"{head}{1e3 * mine.time:>9.3g}{100 * spread(mine.seconds):>4.0f}%"
    beside = f"{1e3 * mine.predicted:.3g} {mine.predicted / mine.time - 1:+.0%}" if mine.predicted else ""
    text += f"{beside:>12}"
    for name in settings.against:
        ratio = mine.time / by[name].time if name == "flat" else by[name].time / mine.time
        text += f"{ratio:>9.3g}"
    bound = f"{100 * mine.share_of_bound:.0f}%" if mine.bound else ""
    wrong = f"  WRONG: {mine.wrong} tensors" if mine.wrong else ""
    return f"{text}{bound:>7}{mine.limit:>7}{100 * mine.check:>6.0f}%{show_nbytes(mine.beyond):>10}{wrong}"


def save_weights_plot(path: Path, result: Result) -> None:
    """Write a PNG: a bar of time for each case and contender. Raises UsageError as `save_figure` does."""
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.seconds]
    if not rows:
        raise UsageError("nothing was measured, so there is nothing to draw")
    cases = list(dict.fromkeys(row.collective for row in rows))
    figure = Figure(figsize=(10, 1.2 + 0.9 * len(cases)), layout="constrained")
    panel = figure.subplots()
    for index, name in enumerate(result.contenders):
        mine = [row for row in rows if row.contender == name]
        at = [cases.index(row.collective) + 0.2 * index for row in mine]
        bars = panel.barh(at, [1e3 * row.time for row in mine], 0.18, label=name, color=_COLOURS[name])
        panel.bar_label(bars, [f" {1e3 * row.time:.3g}" for row in mine], fontsize=7)
    panel.set(xscale="log", xlabel="ms", title=f"weight updates · {result.machine.cpu}")
    panel.set_yticks([index + 0.3 for index in range(len(cases))], cases)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8)
    save_figure(figure, path)
