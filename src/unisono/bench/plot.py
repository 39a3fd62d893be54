"""Results as a picture: latency and bus bandwidth by size, a row of two panels per collective. Never imports torch."""

from collections.abc import Callable
from math import floor, log10
from pathlib import Path
from typing import Any

import numpy as np

from unisono.bench.result import Result, Row, middle_half
from unisono.drawing.drawing import save_figure
from unisono.errors import UsageError
from unisono.units import show_nbytes, show_ranks, show_seconds

__all__ = ["save_plot"]

_BOUND = "#6b7280"
_COLOURS = ("#1f5fbf", "#d95f02", "#2a9d5c", "#a03fb0", "#b8860b", "#c2334d")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_NAMED_SIZES = 6  # up to so many sizes each has its tick
_NARROW, _STEPS = 30.0, (1.0, 2.0, 5.0)  # an axis that spans less has these ticks in every power of ten


def save_plot(path: Path, result: Result) -> None:
    """Write a PNG: time per call and busbw over size, logarithmic axes, every contender, and the machine's bound.

    Bars show the middle half of the runs. A collective without sizes (barrier) is drawn as bars of time; one that
    moves nothing between ranks has no panel of busbw. Raises UsageError if nothing was measured, or the file cannot be
    written.
    """
    from matplotlib.figure import Figure

    kinds = result.kinds
    if not kinds:
        raise UsageError("nothing was measured, so there is nothing to draw")
    figure = Figure(figsize=(12.5, 0.9 + 4.3 * len(kinds)), layout="constrained")
    rows = [row for row in result.rows if row.seconds]
    fits = result.settings.get("pin") and rows[0].ranks <= result.machine.cores
    pinned = ", pinned" if fits else ""
    where = result.machine.gpu or result.machine.cpu
    figure.suptitle(f"{show_ranks(rows[0].ranks)}{pinned} · {rows[0].dtype} · {where}", fontsize=11)
    for (name, timing), (left, right) in zip(kinds, figure.subplots(len(kinds), 2, squeeze=False), strict=True):
        curves = [(contender, result.of(name, contender, timing)) for contender in result.contenders]
        if name == "barrier":
            _bars(left, curves)
        else:
            _times(left, curves, name)
        if any(row.busbw > 0 for _, rows_ in curves for row in rows_):
            _bandwidths(right, curves, name)
        else:
            right.set_axis_off()
    save_figure(figure, path)


def _style(index: int, count: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.6,
        "zorder": 3 + count - index,
    }


def _title(name: str, curves: list[tuple[str, list[Row]]]) -> str:
    first = next(rows[0] for _, rows in curves if rows)
    op = f" ({first.op})" if first.op != "none" else ""
    timing = f", {first.timing}" if first.device != "cpu" else ""
    return f"{name}{op}{timing}"


def _times(panel: Any, curves: list[tuple[str, list[Row]]], name: str) -> None:
    for index, (contender, rows) in enumerate(curves):
        if rows:
            micro = np.array([row.time for row in rows]) * 1e6
            errors = np.abs(np.array([middle_half(row.seconds) for row in rows]).T * 1e6 - micro)
            sizes = [row.nbytes for row in rows]
            panel.errorbar(sizes, micro, yerr=errors, label=contender, capsize=2, **_style(index, len(curves)))
    bounds = {row.nbytes: row.bound * 1e6 for _, rows in curves for row in rows}
    fastest = min(row.time * 1e6 for _, rows in curves for row in rows)
    _bound(panel, {size: bound for size, bound in bounds.items() if bound >= fastest / 8})
    _axes(panel, _title(name, curves), "time per call", lambda micro: show_seconds(micro / 1e6))


def _bandwidths(panel: Any, curves: list[tuple[str, list[Row]]], name: str) -> None:
    for index, (contender, rows) in enumerate(curves):
        if found := [(row.nbytes, row.busbw / 1e9) for row in rows if row.busbw > 0]:
            panel.plot(*zip(*found, strict=True), label=contender, **_style(index, len(curves)))
    moving = [row for _, rows in curves for row in rows if row.bound and row.busbw > 0]
    _bound(panel, {row.nbytes: row.nbytes / row.bound * row.factor / 1e9 for row in moving})
    _axes(panel, f"{_title(name, curves)}: bus bandwidth", "busbw (GB/s)", lambda giga: f"{giga:g}")


def _bound(panel: Any, values: dict[int, float]) -> None:
    """The machine's bound by size: a line, or a dash where there is one size only."""
    if values:
        marker = {"marker": "_", "markersize": 18, "markeredgewidth": 1.6} if len(values) == 1 else {}
        panel.plot(*zip(*sorted(values.items()), strict=True), color=_BOUND, linestyle="--", label="bound", **marker)


def _bars(panel: Any, curves: list[tuple[str, list[Row]]]) -> None:
    found = [(contender, rows[0].time * 1e6) for contender, rows in curves if rows]
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(found))]
    bars = panel.barh([name for name, _ in found], [time for _, time in found], color=colours, height=0.5)
    panel.bar_label(bars, [f" {time:.3g} µs" for _, time in found])
    panel.invert_yaxis()
    panel.set(title="barrier", xlabel="time per call (µs)")
    panel.margins(x=0.2)
    panel.spines[["top", "right"]].set_visible(False)


def _axes(panel: Any, title: str, label: str, show: Callable[[float], str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set(title=title, xlabel="size", ylabel=label)
    sizes = sorted({size for line in panel.get_lines() for size in line.get_xdata()})
    few = len(sizes) <= _NAMED_SIZES
    panel.xaxis.set_major_locator(FixedLocator(sizes) if few else LogLocator(base=16.0, numticks=20))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_nbytes(size)))
    panel.xaxis.minorticks_off()
    low, high = panel.get_ylim()
    narrow = high / low < _NARROW
    if narrow:
        panel.set_ylim(_round(low, up=False), _round(high, up=True))
    panel.yaxis.set_major_locator(LogLocator(base=10.0, subs=_STEPS if narrow else (1.0,), numticks=20))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(which="major", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panel.get_legend_handles_labels()
    last = sorted(zip(handles, labels, strict=True), key=lambda pair: pair[1] == "bound")
    panel.legend(*zip(*last, strict=True), frameon=False)


def _round(value: float, up: bool) -> float:
    """The next round number (1, 2 or 5 times a power of ten) from ``value`` on, upwards or downwards."""
    power = 10.0 ** floor(log10(value))
    steps = [power * step for step in (*_STEPS, 10.0)]
    return next(step for step in steps if step >= value) if up else max(step for step in steps if step <= value)
