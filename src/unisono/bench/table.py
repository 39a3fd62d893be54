"""Results as text, a line per size in nccl-tests' shape. Never imports torch."""

from collections.abc import Sequence
from dataclasses import replace

from unisono.bench.result import Rates, Result, Row, spread
from unisono.bench.settings import Settings
from unisono.units import show_nbytes, show_ranks

__all__ = ["Table", "footer", "preamble", "ratios"]

_COLUMNS = {
    "size": ("B", 10),
    "count": ("", 10),
    "type": ("", 8),
    "redop": ("", 7),
    "time": ("µs", 10),
    "±": ("%", 5),
    "algbw": ("GB/s", 7),
    "busbw": ("GB/s", 7),
    "#wrong": ("", 6),
    "bound": ("%", 6),
    "limit": ("", 7),
}
"""Units and widths."""
_SPARED = (("type", "redop"), ("count",), ("algbw",), ("limit",))
"""Columns left out, in this order, where lines would be wider than the screen; type and redop go to the heading."""
_GAP = "  "
_TIMINGS = {
    "graph": "replay of CUDA graphs, the GPU's time of a call",
    "between": "CUDA graphs, what a call adds between small kernels",
    "eager": "eager calls, the host's time",
    "async": "eager calls with async_op=True, then wait, the host's time",
}
"""Of calls on GPUs."""
_OF_CPUS = ("bound", "limit")


def preamble(result: Result, settings: Settings) -> list[str]:
    """The settings and the machine."""
    cores = settings.pins()
    pinned = f"pinned to core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}" if cores else "not pinned"
    if settings.pin and not cores:
        pinned += f" ({show_ranks(settings.ranks)} do not fit {result.machine.cores} cores)"
    if settings.device == "cuda":
        return [f"# {show_ranks(settings.ranks)}, {result.machine.gpu}; median of {settings.runs} runs",
                f"# {replace(result.machine, gpu='').words()}"]  # fmt: skip
    how = ", asynchronous calls" if settings.asynchronous else ""
    how += ", shared tensors" if settings.memory == "shared" else ""
    return [
        f"# {show_ranks(settings.ranks)}, {pinned}{how}; median of {settings.runs} run{'s' * (settings.runs > 1)}",
        f"# {result.machine.words()}",
        *([f"# left out, for they have no in-place form: {', '.join(settings.left_out)}"] if settings.left_out else []),
    ]


def describe_rates(rates: Rates) -> str:
    """The rates in one line."""
    found = ", ".join(
        f"{copy / 1e9:.3g} at {show_nbytes(size)}" for size, copy in zip(rates.sizes, rates.copy, strict=True)
    )
    return f"# copying, each of the ranks at once, GB/s: {found}"


class Table:
    """A table per collective: the first contender's numbers, and a time and a ratio for each of its rivals.

    ``width``: characters of a line, where that is a screen's; None for no limit. ``on_gpu``: without the bound of CPUs.
    """

    def __init__(self, contenders: Sequence[str], width: int | None = None, on_gpu: bool = False) -> None:
        self.subject, *self.rivals = contenders
        self.columns = [name for name in _COLUMNS if not on_gpu or name not in _OF_CPUS]
        for names in _SPARED:
            if width is None or len(self._names()) <= width:
                break
            self.columns = [name for name in self.columns if name not in names]

    def _names(self) -> str:
        mine = [f"{name:>{_COLUMNS[name][1]}}" for name in self.columns]
        return _GAP.join(["#", *mine, *(f"{name:>{_wide(name)}}{_GAP}{'ratio':>7}" for name in self.rivals)])

    def heading(self, row: Row) -> list[str]:
        """The table's name, whose numbers it shows, and two lines of column names."""
        title = [{"in": "in place", "out": "out of place"}[row.place]]
        if "type" not in self.columns:
            title += [row.dtype] + [row.op] * (row.op != "none")
        if row.collective == "barrier":
            title = []
        units = [f"{_COLUMNS[name][0]:>{_COLUMNS[name][1]}}" for name in self.columns]
        units += [f"{'µs':>{_wide(rival)}}{_GAP}{'×':>7}" for rival in self.rivals]
        if row.device != "cpu":
            title.append(_TIMINGS[row.timing])
        named = f"# {row.collective} {', '.join(title)}".rstrip()
        return ["#", f"{named}: {self.subject}", self._names(), _GAP.join(["#", *units])]

    def line(self, row: Row, rivals: Sequence[Row]) -> str:
        """One size: the subject's numbers, then each rival's time and how many times longer it takes."""
        values = {"size": str(row.nbytes), "count": str(row.count), "type": row.dtype, "redop": row.op}
        if row.refused:
            values["time"] = "refused"
        else:
            values |= {
                "time": _micro(row.time),
                "±": f"{100 * spread(row.seconds):.0f}",
                "algbw": "" if row.of_host else _bandwidth(row.algbw),
                "busbw": "" if row.of_host else _bandwidth(row.busbw),
                "#wrong": "N/A" if row.wrong is None else str(row.wrong),
                "bound": _percent(row.share_of_bound),
                "limit": row.limit,
            }
        cells = [f"{values.get(name, ''):>{_COLUMNS[name][1]}}" for name in self.columns]
        for rival in rivals:
            time = "refused" if rival.refused else _micro(rival.time) + "!" * bool(rival.wrong)
            ratio = "" if rival.refused or row.refused else _ratio(rival.time / row.time)
            cells.append(f"{time:>{_wide(rival.contender)}}{_GAP}{ratio:>7}")
        return _GAP.join([" ", *cells]).rstrip()


def footer(result: Result) -> list[str]:
    """The average busbw as nccl-tests has it, what was wrong or refused, and how rivals compare over all sizes."""
    if not result.rows:
        return ["# nothing measured"]
    subject, *rivals = result.contenders
    mine = [row for row in result.rows if row.contender == subject and row.seconds]
    lines = ["#"]
    if not result.complete:
        lines.append("# interrupted: this is what was measured until then")
    timings = list(dict.fromkeys(row.timing for row in result.rows))
    if mine and len(timings) == 1:
        lines.append(f"# avg bus bandwidth: {sum(row.busbw for row in mine) / len(mine) / 1e9:.4g} GB/s")
    for timing, rival in ((timing, rival) for timing in timings for rival in rivals):
        if found := ratios(result, subject, rival, timing):
            low, middle, high = _ratio(min(found)), _ratio(sorted(found)[len(found) // 2]), _ratio(max(found))
            times = f"{low} times as long" if low == high else f"{low} to {high} times as long, {middle} in the middle"
            lines.append(f"# {f'{timing}: ' * (len(timings) > 1)}{rival} takes {times}")
    checked = [row for row in result.rows if row.wrong is not None]
    bad = [row for row in checked if row.wrong]
    lines += [f"# WRONG: {row.contender} {row.collective} {row.nbytes} B, {row.wrong} elements" for row in bad]
    if checked and not bad:
        right = f"all {len(checked)} results checked are" if len(checked) > 1 else "the result checked is"
        lines.append(f"# {right} right")
    refusals: dict[tuple[str, str], dict[str, None]] = {}
    for row in result.rows:
        if row.refused:
            refusals.setdefault((row.contender, row.refused), {})[row.collective] = None
    return [*lines, *(f"# refused by {name} {', '.join(what)}: {why}" for (name, why), what in refusals.items())]


def ratios(result: Result, subject: str, rival: str, timing: str = "eager") -> list[float]:
    """The rival's time by the subject's, wherever both were measured."""
    rows = [row for row in result.rows if row.seconds and row.timing == timing]
    found = {(r.collective, r.nbytes): r.time for r in rows if r.contender == subject}
    theirs = (r for r in rows if r.contender == rival)
    return [r.time / found[r.collective, r.nbytes] for r in theirs if (r.collective, r.nbytes) in found]


def _wide(rival: str) -> int:
    return max(10, len(rival))


def _micro(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.2f}" if micro < 100 else f"{micro:.1f}" if micro < 1000 else f"{micro:.0f}"


def _bandwidth(rate: float) -> str:
    giga = rate / 1e9
    return f"{giga:.2f}" if giga < 100 else f"{giga:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"
