"""Two results side by side: which changes are real. Never imports torch.

A change is called real if all of these hold:

- the runs of the two sides are so far apart that chance would do it rarely: the two-sided Mann-Whitney U test (exact
  for up to 20 runs a side, Mann and Whitney 1947), with the share of false alarms over all rows held at 5 %
  (Benjamini and Hochberg 1995);
- the whole interval of the change is 5 % or more away from 1, and from the machine's own change, in either direction:
  how fast it copied when each result was taken.

The interval is the middle 95 % of the ratio of medians over 4,000 resamples of both sides (bootstrap, Efron 1979).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, erfc, exp, log, sqrt
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from unisono.bench.result import Result, Row
from unisono.errors import UsageError
from unisono.units import show_seconds

__all__ = ["Change", "changes", "compare", "drift", "interval", "mann_whitney"]

ALPHA, LEAST = 0.05, 0.05
_RESAMPLES, _EXACT = 4000, 20
_SETTINGS = ("asynchronous", "memory", "pin", "root")
_MACHINE = ("cpu", "cores", "system", "python", "torch", "unisono", "mpi", "gpu")
"""Settings that should be equal on both sides."""
_Key = tuple[str, str, int, str, str, str, int, str, str]


@dataclass(frozen=True)
class Change:
    """One row in both results. ``ratio`` is time after by time before; ``low`` to ``high`` its 95 % interval."""

    before: Row
    after: Row
    ratio: float
    low: float
    high: float
    chance: float
    verdict: str


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p-value: the probability that two samples of one distribution differ as much, or more.

    Exact without ties for up to 20 values a side, else by the normal approximation with the correction for ties.
    """
    n, m = len(a), len(b)
    below = sum(x < y for x in a for y in b) + 0.5 * sum(x == y for x in a for y in b)
    u = min(below, n * m - below)
    values, repeats = np.unique([*a, *b], return_counts=True)
    if len(values) == n + m and max(n, m) <= _EXACT:
        ways = sum(_ways(n, m, k) for k in range(int(u) + 1))
        return float(min(1.0, 2 * ways / comb(n + m, n)))
    total = n + m
    ties = float(np.sum(repeats.astype(float) ** 3 - repeats)) / (total * (total - 1))
    deviation = sqrt(n * m / 12 * (total + 1 - ties))
    if deviation == 0:
        return 1.0
    return min(1.0, erfc(max(0.0, n * m / 2 - u - 0.5) / deviation / sqrt(2)))


@lru_cache(maxsize=100_000)
def _ways(n: int, m: int, u: int) -> int:
    """In how many orders of n values of one kind and m of another U is ``u`` (Mann and Whitney's recurrence)."""
    if u < 0 or u > n * m:
        return 0
    if n == 0 or m == 0:
        return int(u == 0)
    return _ways(n - 1, m, u - m) + _ways(n, m - 1, u)


def interval(before: Sequence[float], after: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of median(after) / median(before); the same for the same input."""
    generator = np.random.default_rng(seed)
    ratio = _medians(after, generator) / _medians(before, generator)
    low, high = np.quantile(ratio, [0.025, 0.975])
    return float(low), float(high)


def _medians(values: Sequence[float], generator: np.random.Generator) -> NDArray[np.float64]:
    picks = generator.integers(len(values), size=(_RESAMPLES, len(values)))
    found: NDArray[np.float64] = np.median(np.asarray(values, dtype=np.float64)[picks], axis=1)
    return found


def drift(before: Result, after: Result) -> float:
    """The ratio of copying times, ``after`` to before: the geometric mean over the sizes that both have."""
    old = dict(zip(before.rates.sizes, before.rates.copy, strict=True))
    new = dict(zip(after.rates.sizes, after.rates.copy, strict=True))
    both = [log(old[size] / new[size]) for size in old if size in new]
    return exp(fmean(both)) if both else 1.0


def changes(before: Result, after: Result) -> list[Change]:
    """The rows that both results have, with a verdict each: ``faster``, ``slower`` or ``noise``.

    Raises UsageError if there is none.
    """
    old = {_key(row): row for row in before.rows if row.seconds}
    pairs = [(old[_key(row)], row) for row in after.rows if row.seconds and _key(row) in old]
    if not pairs:
        raise UsageError("the two results have no row in common: same collective, contender, size, dtype, op and ranks")
    chances = [mann_whitney(a.seconds, b.seconds) for a, b in pairs]
    most, machine = _threshold(chances), drift(before, after)
    least = (1 + LEAST) * max(machine, 1 / machine)
    found = []
    for (a, b), chance in zip(pairs, chances, strict=True):
        low, high = interval(a.seconds, b.seconds)
        verdict = "noise"
        if chance <= most and (low >= least or high <= 1 / least):
            verdict = "slower" if low > 1 else "faster"
        found.append(Change(a, b, b.time / a.time, low, high, chance, verdict))
    return found


def _key(row: Row) -> _Key:
    return row.collective, row.contender, row.nbytes, row.dtype, row.op, row.place, row.ranks, row.device, row.timing


def _threshold(chances: Sequence[float]) -> float:
    """The largest p-value that is still taken for real (Benjamini and Hochberg's step-up)."""
    ordered = sorted(chances)
    passed = [p for k, p in enumerate(ordered, start=1) if p <= ALPHA * k / len(ordered)]
    return max(passed, default=-1.0)


def compare(before: Result, after: Result) -> list[str]:
    """The comparison as lines of text."""
    found = changes(before, after)
    slower = drift(before, after)
    lines = [
        "# change: time after / time before, with its 95 % interval; p: Mann-Whitney; see `unisono.bench.compare`",
        f"# the machine copied {slower:.2f} × as long at the time of the later result: smaller changes count as noise",
    ]
    lines += _warnings(before, after)
    lines.append(
        f"  {'collective':<14}  {'contender':<12}  {'size':>10}  {'before':>8}  {'after':>8}  {'change':>7}  "
        f"{'95 % interval':>15}  {'p':>7}  verdict"
    )
    lines += [_line(change) for change in found]
    counts = {verdict: sum(c.verdict == verdict for c in found) for verdict in ("faster", "slower", "noise")}
    middle = exp(median(log(change.ratio) for change in found))
    few = min(min(len(c.before.seconds), len(c.after.seconds)) for c in found)
    lines.append(
        f"# {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}; change in the middle {middle:.2f} ×"
    )
    if few < 5:
        lines.append(f"# rows with {few} runs a side can show no difference: measure with --runs 7 or more")
    return lines


def _warnings(before: Result, after: Result) -> list[str]:
    """Differences that make two results hard to compare."""
    lines = []
    for side, result in (("earlier", before), ("later", after)):
        if not result.complete:
            lines.append(f"# the {side} result was interrupted")
        if (load := result.machine.load) >= result.machine.cores > 0:
            lines.append(
                f"# the machine was busy before the {side} result (load {load:.1f} on {result.machine.cores} cores): "
                "expect changes that are no change of the code"
            )
    pairs = [(name, before.settings.get(name), after.settings.get(name)) for name in _SETTINGS]
    pairs += [(name, getattr(before.machine, name), getattr(after.machine, name)) for name in _MACHINE]
    return lines + [f"# unlike: {name} is {old} before, {new} after" for name, old, new in pairs if old != new]


def _line(c: Change) -> str:
    times = f"{show_seconds(c.before.time):>8}  {show_seconds(c.after.time):>8}"
    named = c.before.collective + f" {c.before.timing}" * (c.before.device != "cpu")
    return (
        f"  {named:<14}  {c.before.contender:<12}  {c.before.nbytes:>10}  {times}  {c.ratio:>7.2f}  "
        f"{c.low:>6.2f} - {c.high:<6.2f}  {c.chance:>7.4f}  {c.verdict}"
    )
