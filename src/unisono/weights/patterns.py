"""Patterns of names: `*` matches any characters and is carried over; a compiled regular expression works too."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from unisono.errors import UsageError

__all__ = [
    "Pattern", "captures", "checked_pattern", "checked_template", "expand", "first_match", "pattern_from_json",
    "pattern_to_json", "show_pattern",
]  # fmt: skip

Pattern = str | re.Pattern[str]
_V = TypeVar("_V")


@lru_cache(maxsize=1024)
def _compiled(pattern: Pattern) -> re.Pattern[str]:
    if isinstance(pattern, re.Pattern):
        return pattern
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def captures(pattern: Pattern, name: str) -> tuple[str, ...] | None:
    """What the stars (or groups) of a pattern stand for in a name; None if it does not match."""
    match = _compiled(pattern).fullmatch(name)
    return None if match is None else tuple(group or "" for group in match.groups())


def expand(template: str, found: Sequence[str], pattern: Pattern) -> str:
    """The name that a template gives: its stars replaced by `found` in order, or `\\1` by the first of them.

    Raises UsageError if it has more stars than there are.
    """
    if "\\" in template:
        asked = max(map(int, re.findall(r"\\(\d)", template)), default=0)
        if asked > len(found):
            raise UsageError(f"{template!r} asks for group {asked}, but {show_pattern(pattern)} has {len(found)}")
        return re.sub(r"\\(\d)", lambda m: found[int(m[1]) - 1], template)
    pieces = template.split("*")
    if len(pieces) - 1 > len(found):
        raise UsageError(f"{template!r} has {len(pieces) - 1} stars, but {show_pattern(pattern)} only {len(found)}")
    return "".join(a + b for a, b in zip(pieces, [*found[: len(pieces) - 1], ""], strict=True))


def checked_pattern(pattern: Any) -> Pattern:
    """The pattern. Raises UsageError for what is none."""
    if not isinstance(pattern, str | re.Pattern):
        raise UsageError(f"a pattern is text or a compiled regular expression, got {pattern!r}")
    return pattern


def checked_template(template: Any, pattern: Any) -> str:
    """The template of a name. Raises UsageError for what is none, or asks for more than the pattern matches."""
    if not isinstance(template, str):
        raise UsageError(f"a name is text, got {template!r}")
    expand(template, [""] * _compiled(checked_pattern(pattern)).groups, pattern)
    return template


def first_match(given: Mapping[Any, _V], names: Iterable[str], what: str) -> dict[str, _V]:
    """For each name that a pattern matches, the value of the first that does.

    Raises UsageError for a pattern that matches no name.
    """
    names, found, used = list(names), dict[str, _V](), set()
    for name in names:
        for pattern, value in given.items():
            if captures(pattern, name) is not None:
                used.add(pattern)
                found.setdefault(name, value)
    for pattern in given:
        if pattern not in used:
            raise UsageError(f"{what}: {show_pattern(pattern)} matches no tensor; there are {some(names)}")
    return found


def some(names: Sequence[str], limit: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


def show_pattern(pattern: Pattern) -> str:
    """A pattern as it is written in Python."""
    if not isinstance(pattern, re.Pattern):
        return f'"{pattern}"'
    flags = pattern.flags & ~re.UNICODE
    return f"re.compile({pattern.pattern!r}{f', {re.RegexFlag(flags)!r}' if flags else ''})"


def pattern_to_json(pattern: Pattern) -> Any:
    """A pattern in JSON: text, or {"re": expression}, with {"flags": number} if it has some."""
    if not isinstance(pattern, re.Pattern):
        return pattern
    flags = pattern.flags & ~re.UNICODE  # which every pattern of text has
    return {"re": pattern.pattern} | ({"flags": flags} if flags else {})


def pattern_from_json(data: Any) -> Pattern:
    """The pattern that pattern_to_json described. Raises UsageError if it cannot be read."""
    if isinstance(data, str):
        return data
    try:
        return re.compile(data["re"], data.get("flags", 0))
    except (TypeError, KeyError, AttributeError, ValueError, re.error) as problem:
        raise UsageError(f'a pattern is text or {{"re": expression}}, got {data!r} ({problem})') from None
