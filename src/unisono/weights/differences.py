"""Everything in which a receiver's tensors differ from what is sent, in words, with nearest names and the remedy."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from unisono.weights.layout import dtype_name

__all__ = ["Difference", "show_differences"]

Kind = tuple[torch.dtype, tuple[int, ...]]
_CANDIDATES, _COMPARED, _NEAREST, _WIDEST = 64, 8, 2, 60


@dataclass(frozen=True)
class Difference:
    """One difference: missing, unexpected, shape, dtype or tied; dtype and shape on each side that has the name."""

    what: str
    name: str
    sender: Kind | None = None
    receiver: Kind | None = None
    other: str = ""


def show_differences(found: Sequence[Difference], sent: Sequence[str], wanted: Sequence[str], who: str) -> str:
    """All differences, a line each."""
    missing, unexpected = _names(found, "missing"), _names(found, "unexpected")
    partners = _partners(missing, unexpected) | _partners(unexpected, missing)
    near_missing = _Nearest([name for name in unexpected or sent if name not in partners])
    near_unexpected = _Nearest([name for name in missing or wanted if name not in partners])
    lines = []
    width = min(max(len(each.name) for each in found), _WIDEST)
    for each in found:
        near = {"missing": near_missing, "unexpected": near_unexpected}.get(each.what)
        names = [partners[each.name]] if each.name in partners else near.to(each.name) if near else []
        lines.append(f"  {each.what:<10}  {each.name:<{width}}  {_words(each, names)}")
    count = f"{len(found)} difference{'s' * (len(found) > 1)}"
    return f"what is sent does not fit {who}: {count}\n" + "\n".join(lines)


def _partners(short: Sequence[str], long: Sequence[str]) -> dict[str, str]:
    """Names of `short` that are names of `long` without what a wrapper has added, and those of `long`."""
    known, partners = set(short), dict[str, str]()
    for name in long:
        rest = next((each for each in _unwrapped(name) if each in known), None)
        if rest is not None and rest not in partners:
            partners |= {rest: name, name: rest}
    return partners


def _unwrapped(name: str) -> Iterator[str]:
    """A name without its first parts, then without one in the middle too."""
    parts = name.split(".")
    yield from (".".join(parts[first:]) for first in range(1, len(parts)))
    for first, last in ((i, k) for i in range(len(parts) - 2) for k in range(i + 1, len(parts) - 1)):
        if not parts[last].isdigit():
            yield ".".join(parts[first:last] + parts[last + 1 :])


def _names(found: Sequence[Difference], what: str) -> list[str]:
    return [each.name for each in found if each.what == what]


def _show(kind: Kind | None) -> str:
    return "" if kind is None else f"{dtype_name(kind[0])} {list(kind[1])}"


def _words(each: Difference, near: Sequence[str]) -> str:
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    match each.what:
        case "missing":
            rule = _rename(near[0], each.name) if near else ""
            return f'{_show(each.receiver)} is wanted and not sent{nearest}; {_or(rule)}ignore("{each.name}")'
        case "unexpected":
            rule = _rename(each.name, near[0]) if near else ""
            return f'{_show(each.sender)} is sent and not wanted{nearest}; {_or(rule)}ignore("{each.name}")'
        case "tied":
            return (
                f"{_show(each.sender)} is sent beside {each.other}, to which the receiver ties it; "
                f'tie("{each.name}", "{each.other}") or ignore("{each.name}")'
            )
    return f"{_show(each.sender)} is sent, {_show(each.receiver)} is wanted; {_mend(each)}"


def _or(rule: str) -> str:
    return f"{rule} or " if rule else ""


def _mend(each: Difference) -> str:
    assert each.sender is not None
    assert each.receiver is not None
    (dtype, shape), (wanted_dtype, wanted) = each.sender, each.receiver
    if each.what == "dtype":
        both = dtype.is_floating_point and wanted_dtype.is_floating_point
        return f'cast("{each.name}")' if both else f'cast("{each.name}", torch.{dtype_name(wanted_dtype)})'
    if shape != wanted and sorted(shape) == sorted(wanted):
        dims = tuple(_permutation(shape, wanted))
        return f'transpose("{each.name}"' + (")" if dims == (1, 0) else f", dims={dims})")
    return "shard= declares tensors that are a rank's part; split and fuse cut and join"


def _permutation(shape: Sequence[int], wanted: Sequence[int]) -> list[int]:
    left, dims = list(range(len(shape))), []
    for length in wanted:
        dims.append(next(dim for dim in left if shape[dim] == length))
        left.remove(dims[-1])
    return dims


def _rename(old: str, new: str) -> str:
    return _rules_between(old, new) or f'rename("{old}", "{new}")'


def _rules_between(old: str, new: str) -> str:
    """The renames that take off, or put on, what a wrapper adds to names, if that is all in which two names differ.

    That is a prefix (``module.``), parts in the middle (``_orig_mod``, ``base_layer``), or both.
    """
    if new.endswith(f".{old}"):
        return f'rename("*", "{new[: -len(old)]}*")'
    if old.endswith(f".{new}"):
        return f'rename("{old[: -len(new)]}*", "*")'
    parts, wanted = old.split("."), new.split(".")
    for prefix in range(len(parts) - len(wanted) + 1):
        inner = _inserted(parts[prefix:], wanted)
        if inner is not None:
            rules = [f'rename("{".".join(parts[:prefix])}.*", "*")'] * bool(prefix)
            rules += [f'rename("*.{inner}.*", "*.*")'] * bool(inner)
            return ", ".join(rules)
    return ""


def _inserted(parts: Sequence[str], wanted: Sequence[str]) -> str | None:
    """What stands in one place within a name that is otherwise another: "" for nothing, None if more differs."""
    first = next((i for i, (a, b) in enumerate(zip(parts, wanted, strict=False)) if a != b), len(wanted))
    count = len(parts) - len(wanted)
    run = parts[first : first + count]
    inside = 0 < first < len(wanted) and not any(part.isdigit() for part in run)
    if list(parts[first + count :]) != list(wanted[first:]) or (count and not inside):
        return None
    return ".".join(run)


class _Nearest:
    """The names most like another: of those that share its rarest words, by letters."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.by_word: dict[str, list[str]] = {}
        for name in names:
            for word in _words_of(name):
                self.by_word.setdefault(word, []).append(name)

    def to(self, name: str) -> list[str]:
        """At most two names, the nearest first."""
        words = _words_of(name)
        lists = sorted((self.by_word[word] for word in words if word in self.by_word), key=len) or [list(self.names)]
        near = dict.fromkeys(other for found in lists[:2] for other in found[:_CANDIDATES] if other != name)
        alike = sorted(near, key=lambda other: len(words.keys() & _words_of(other)), reverse=True)[:_COMPARED]
        rated = sorted(((SequenceMatcher(None, name, other).ratio(), other) for other in alike), reverse=True)
        return [other for ratio, other in rated[:_NEAREST] if ratio > 0.4]


def _words_of(name: str) -> dict[str, None]:
    return dict.fromkeys(re.findall(r"[^._]+", name))
