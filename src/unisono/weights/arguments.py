"""Numbers and flags that users pass, checked at once: what does not suit is a `UsageError` of this rank alone."""

from collections.abc import Iterable
from operator import index
from typing import Any

from unisono.errors import UsageError

__all__ = ["check_version", "flag", "seconds_of", "whole", "whole_number", "wholes"]

_LONGEST = 1e8  # s, three years: what is longer is as good as for ever, and clocks overflow


def seconds_of(value: Any, name: str = "timeout", zero: bool = True) -> float:
    """A time as a number of seconds; ``zero``: it may be 0, to look once."""
    if isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 or (zero and value == 0)):
        return min(value, _LONGEST)
    raise UsageError(f"{name}={value!r}: expected {'at least' if zero else 'more than'} 0 seconds")


def flag(value: Any, name: str) -> bool:
    """True or False; nothing else that is as good as one of them, such as "no" or 1."""
    if isinstance(value, bool):
        return value
    raise UsageError(f"{name}={value!r}: expected True or False")


def whole_number(value: Any, name: str, least: int) -> int:
    """An int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}: expected an int of at least {least}")
    return value


def check_version(value: Any) -> None:
    """None, or an int of at least 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UsageError(f"version={value!r}: expected an int of at least 0, or None for the next")


def whole(value: Any, what: str) -> int:
    """An int. Raises UsageError for anything else."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise UsageError(f"{what} must be an int, got {value!r}")


def wholes(values: Any, what: str) -> tuple[int, ...]:
    """Several ints. Raises UsageError for anything else."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{what} must be ints, got {values!r}")
    return tuple(whole(value, what) for value in values)
