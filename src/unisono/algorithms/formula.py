"""Formulas for steps and bytes: readable in documents, and computable.

    n      ranks                                L      ceil(log2 n)
    k      chunks (pieces per block)            p      largest power of two up to n
    a, b   columns and rows of the most         x      n - p, the ranks beyond it (for halving and doubling)
           nearly square grid, a >= b                (x>0), (a>1) ...: 1 where it is so, else 0

A formula that starts with "<=" is an upper bound.
"""

from dataclasses import dataclass
from math import isqrt
from types import CodeType

from unisono.errors import UsageError

__all__ = ["Formula", "ceil_log2", "squarish"]

_NAMES = frozenset("nkLpxab") | {"min", "max"}


@dataclass(frozen=True)
class Formula:
    """Arithmetic over the names above. Raises UsageError if it cannot be read or uses another name."""

    text: str

    def __post_init__(self) -> None:
        unknown = sorted(set(self._code().co_names) - _NAMES)
        if unknown:
            raise UsageError(f"formula {self.text!r}: unknown name {', '.join(unknown)}")

    @property
    def is_bound(self) -> bool:
        """True if the value is an upper bound rather than exact."""
        return self.text.startswith("<=")

    def __call__(self, world_size: int, chunks: int = 1) -> float:
        """The value for a number of ranks and chunks; 0 for one rank, which has no rank to talk to."""
        if world_size == 1:
            return 0.0
        rows, columns = squarish(world_size)
        power = 1 << (world_size.bit_length() - 1)
        values = {"n": world_size, "k": chunks, "L": ceil_log2(world_size), "p": power, "x": world_size - power}
        return float(
            eval(self._code(), {"__builtins__": {}, "min": min, "max": max, "a": columns, "b": rows, **values})
        )

    def _code(self) -> CodeType:
        try:
            return compile(self.text.removeprefix("<=").strip(), "<formula>", "eval")
        except SyntaxError:
            raise UsageError(f"formula {self.text!r} cannot be read") from None

    def __str__(self) -> str:
        return self.text


def ceil_log2(n: int) -> int:
    """The least L with 2**L >= n, for n >= 1."""
    return (n - 1).bit_length()


def squarish(n: int) -> tuple[int, int]:
    """(rows, columns) of the most nearly square grid of n cells, rows <= columns."""
    rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
    return rows, n // rows
