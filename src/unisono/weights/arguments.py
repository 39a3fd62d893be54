"""Arguments of senders and receivers, checked at once: what does not suit is a `UsageError` of this rank alone."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.errors import UsageError
from unisono.weights.layout import Shard
from unisono.weights.rules import Rule

__all__ = ["check_rules", "check_sharding", "check_version", "seconds_of", "whole_number"]

_LONGEST = 1e8  # s, three years: what is longer is as good as for ever, and clocks overflow


def seconds_of(value: Any, name: str = "timeout", zero: bool = True) -> float:
    """A time as a number of seconds; ``zero``: it may be 0, to look once."""
    if isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 or (zero and value == 0)):
        return min(value, _LONGEST)
    raise UsageError(f"{name}={value!r}: expected {'at least' if zero else 'more than'} 0 seconds")


def whole_number(value: Any, name: str, least: int) -> int:
    """An int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}: expected an int of at least {least}")
    return value


def check_version(value: Any) -> None:
    """None, or an int of at least 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UsageError(f"version={value!r}: expected an int of at least 0, or None for the next")


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules as a tuple."""
    found = tuple(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else (rules,)
    wrong = next((rule for rule in found if not isinstance(rule, Rule)), None)
    if wrong is not None or not isinstance(rules, Iterable):
        raise UsageError(f"rules={rules!r}: expected a list of rules, such as [rename('model.*', '*')]")
    return found


def check_sharding(shard: Any) -> None:
    """None, or a mapping of patterns to dims and `Shard`s."""
    if shard is None:
        return
    if isinstance(shard, Mapping) and all(
        isinstance(key, str | re.Pattern) and isinstance(dim, int | Shard) for key, dim in shard.items()
    ):
        return
    raise UsageError(f"shard={shard!r}: expected a mapping of patterns to dims or Shards, such as {{'*.up.weight': 0}}")
