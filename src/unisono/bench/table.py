"""Results as text, a line per size in nccl-tests' shape. Never imports torch."""

from collections.abc import Iterable, Sequence

from unisono.bench.result import Rates, Result, Row, spread
from unisono.bench.settings import Settings
from unisono.units import show_nbytes

__all__ = ["footer", "heading", "line", "preamble", "ratios"]

_COLUMNS = (
    ("size", "B", 10),
    ("count", "", 10),
    ("type", "", 8),
    ("redop", "", 7),
    ("time", "µs", 10),
    ("±", "%", 5),
    ("algbw", "GB/s", 7),
    ("busbw", "GB/s", 7),
    ("#wrong", "", 6),
    ("bound", "%", 6),
    ("limit", "", 7),
)


def preamble(result: Result, settings: Settings) -> list[str]:
    """What was asked, and where."""
    cores = settings.pins()
    pinned = f"pinned to cores {', '.join(map(str, cores))}" if cores else "not pinned"
    if settings.pin and not cores:
        pinned += f" ({settings.ranks} ranks do not fit {result.machine.cores} cores)"
    how = ", asynchronous calls" if settings.asynchronous else ""
    how += ", shared tensors" if settings.memory == "shared" else ""
    return [
        f"# {settings.ranks} ranks, {pinned}{how}; median of {settings.runs} runs",
        f"# {result.machine.words()}",
    ]


def describe_rates(rates: Rates) -> str:
    """The rates in one line."""
    found = ", ".join(
        f"{copy / 1e9:.3g} at {show_nbytes(size)}" for size, copy in zip(rates.sizes, rates.copy, strict=True)
    )
    return f"# copying, each of the ranks at once, GB/s: {found}"


def heading(collective: str, place: str, rivals: Sequence[str]) -> list[str]:
    """Name of the table and its two lines of column names; each rival has a time and a ratio."""
    form = {"in": "in place", "out": "out of place"}[place] if collective != "barrier" else ""
    names = "  ".join(f"{name:>{width}}" for name, _, width in _COLUMNS)
    units = "  ".join(f"{unit:>{width}}" for _, unit, width in _COLUMNS)
    for rival in rivals:
        names += f"  {rival:>{_wide(rival)}}  {'ratio':>7}"
        units += f"  {'µs':>{_wide(rival)}}  {'×':>7}"
    return ["#", f"# {collective} {form}".rstrip(), f"# {names}", f"# {units}"]


def line(row: Row, rivals: Sequence[Row]) -> str:
    """One size: the subject's numbers, then each rival's time and how many times longer it takes."""
    if row.refused:
        return f"  {row.nbytes:>10}  {row.count:>10}  {row.dtype:>8}  {row.op:>7}  refused: {row.refused}"
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    values = (
        str(row.nbytes), str(row.count), row.dtype, row.op, _micro(row.time), f"{100 * spread(row.seconds):.0f}",
        _bandwidth(row.algbw), _bandwidth(row.busbw), wrong, _percent(row.share_of_bound), row.limit,
    )  # fmt: skip
    text = "  ".join(f"{value:>{width}}" for value, (_, _, width) in zip(values, _COLUMNS, strict=True))
    for rival in rivals:
        wide = _wide(rival.contender)
        if rival.refused:
            text += f"  {'refused':>{wide}}  {'':>7}"
        else:
            mark = "!" if rival.wrong else ""
            text += f"  {_micro(rival.time) + mark:>{wide}}  {_ratio(rival.time / row.time):>7}"
    return f"  {text}"


def footer(result: Result) -> list[str]:
    """The average busbw as nccl-tests has it, what was wrong or refused, and how rivals compare over all sizes."""
    if not result.rows:
        return ["# nothing measured"]
    subject, *rivals = result.contenders
    mine = [row for row in result.rows if row.contender == subject and row.seconds]
    lines = ["#"]
    if not result.complete:
        lines.append("# interrupted: this is what was measured until then")
    if mine:
        lines.append(f"# avg bus bandwidth: {sum(row.busbw for row in mine) / len(mine) / 1e9:.4g} GB/s")
    for rival in rivals:
        if found := ratios(result, subject, rival):
            middle = sorted(found)[len(found) // 2]
            lines.append(
                f"# {rival} takes {_ratio(min(found))} to {_ratio(max(found))} times as long, {_ratio(middle)} in the "
                "middle"
            )
    checked = [row for row in result.rows if row.wrong is not None]
    bad = [row for row in checked if row.wrong]
    lines += [f"# WRONG: {row.contender} {row.collective} {row.nbytes} B, {row.wrong} elements" for row in bad]
    if checked and not bad:
        lines.append(f"# all {len(checked)} results checked are right")
    refusals = dict.fromkeys(f"{r.contender} {r.collective}: {r.refused}" for r in result.rows if r.refused)
    return [*lines, *(f"# refused by {text}" for text in refusals)]


def ratios(result: Result, subject: str, rival: str) -> list[float]:
    """The rival's time by the subject's, wherever both were measured."""
    found = {(r.collective, r.nbytes): r.time for r in result.rows if r.contender == subject and r.seconds}
    keys: Iterable[Row] = (r for r in result.rows if r.contender == rival and r.seconds)
    return [r.time / found[r.collective, r.nbytes] for r in keys if (r.collective, r.nbytes) in found]


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
