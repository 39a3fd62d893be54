"""Sizes, times and counts as people write them: `4`, `1KiB`, `1M`, `256MB` in; `1 MiB`, `12.3 µs`, `2 ranks` out."""

import re
from collections.abc import Iterable, Sequence

from unisono.errors import UsageError

__all__ = [
    "as_nbytes",
    "consecutive",
    "name_ranks",
    "parse_nbytes",
    "show_count",
    "show_nbytes",
    "show_ranks",
    "show_seconds",
    "show_spans",
]

_BINARY = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)(b?))", re.IGNORECASE)


def parse_nbytes(text: str) -> int:
    """Bytes of a size: `4`, `1KiB`, `1M` (2**20, as benchmarks of collectives have it), `256MB` (256 * 10**6).

    Raises UsageError if the text is no size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not (match[2] and match[4])):
        raise UsageError(f"{text!r} is not a size: expected a number of bytes such as 4, 1KiB, 1M or 256MB")
    power = _BINARY.index(match[2].upper())
    base = 1000 if match[2] and match[4] and not match[3] else 1024
    value = float(match[1]) * base**power if "." in match[1] else int(match[1]) * base**power
    if value != int(value):
        raise UsageError(f"{text!r} is not a whole number of bytes")
    return int(value)


def as_nbytes(size: str | float) -> float:
    """Bytes of a size that is a number or a text. Raises UsageError as `parse_nbytes` does."""
    return parse_nbytes(size) if isinstance(size, str) else size


def show_nbytes(nbytes: float) -> str:
    """Three digits and a binary unit: `4 B`, `1.5 KiB`, `256 MiB`."""
    power = 0
    while power < len(_BINARY) - 1 and round(nbytes) >= 1024:
        nbytes /= 1024
        power += 1
    unit = f"{_BINARY[power]}iB" if power else "B"
    return f"{_digits(nbytes)} {unit}"


def show_count(number: int, what: str) -> str:
    """`1 rank`, `4 ranks`, `2 switches`, `24,576 ranks`."""
    ending = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{ending}"


def show_ranks(count: int) -> str:
    """`1 rank`, `4 ranks`."""
    return show_count(count, "rank")


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def show_spans(numbers: Iterable[int], between: str = ", ", least: int = 3) -> str:
    """Ascending numbers, those that follow each other as ranges of `least` or more: `0-3, 7`."""
    return between.join(
        f"{run[0]}-{run[-1]}" if len(run) >= least else between.join(map(str, run)) for run in consecutive(numbers)
    )


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as runs of those that follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def show_seconds(seconds: float) -> str:
    """Three digits and a unit: `0 s`, `120 ns`, `12.3 µs`, `4.56 ms`, `1.2 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds > 0 else "0 s"


def _digits(value: float) -> str:
    """Three significant digits, whole numbers from 100 on, no zeros after the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
