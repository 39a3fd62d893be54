"""Everything in which a receiver's tensors differ from what is sent, in words, with nearest names and the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from unisono.weights.layout import dtype_name

__all__ = ["Difference", "show_differences"]

Kind = tuple[torch.dtype, tuple[int, ...]]
_CANDIDATES, _NEAREST, _WIDEST = 64, 2, 60


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
    near_missing, near_unexpected = _Nearest(unexpected or sent), _Nearest(missing or wanted)
    lines = []
    width = min(max(len(each.name) for each in found), _WIDEST)
    for each in found:
        near = {"missing": near_missing, "unexpected": near_unexpected}.get(each.what)
        names = near.to(each.name) if near else []
        lines.append(f"  {each.what:<10}  {each.name:<{width}}  {_words(each, names)}")
    count = f"{len(found)} difference{'s' * (len(found) > 1)}"
    return f"what is sent does not fit {who}: {count}\n" + "\n".join(lines)


def _names(found: Sequence[Difference], what: str) -> list[str]:
    return [each.name for each in found if each.what == what]


def _show(kind: Kind | None) -> str:
    return "" if kind is None else f"{dtype_name(kind[0])} {list(kind[1])}"


def _words(each: Difference, near: Sequence[str]) -> str:
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    match each.what:
        case "missing":
            rule = f'rename("{near[0]}", "{each.name}")' if near else ""
            rule = _prefix_rule(near[0], each.name) or rule if near else rule
            return f'{_show(each.receiver)} is wanted and not sent{nearest}; {_or(rule)}ignore("{each.name}")'
        case "unexpected":
            rule = (_prefix_rule(each.name, near[0]) or f'rename("{each.name}", "{near[0]}")') if near else ""
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


def _prefix_rule(old: str, new: str) -> str:
    """The rename that takes a prefix off or puts one on, if that is all in which the names differ."""
    if old.endswith(f".{new}"):
        return f'rename("{old[: -len(new)]}*", "*")'
    return f'rename("*", "{new[: -len(old)]}*")' if new.endswith(f".{old}") else ""


class _Nearest:
    """The names most like another: those that end alike first, then by letters."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.by_end: dict[str, list[str]] = {}
        for name in names:
            for count in (1, 2):
                self.by_end.setdefault(_end(name, count), []).append(name)

    def to(self, name: str) -> list[str]:
        """At most two names, the nearest first."""
        near = self.by_end.get(_end(name, 2)) or self.by_end.get(_end(name, 1)) or self.names
        near = [other for other in near if other != name]
        near = sorted(near, key=lambda other: _common_end(name, other), reverse=True)[:_CANDIDATES]
        rated = sorted(((SequenceMatcher(None, name, other).ratio(), other) for other in near), reverse=True)
        return [other for ratio, other in rated[:_NEAREST] if ratio > 0.4]


def _end(name: str, count: int) -> str:
    return ".".join(name.split(".")[-count:])


def _common_end(a: str, b: str) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count
