"""Fit: which of the sender's tensors each of a receiver's is made of, or everything that does not fit, in one error."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from unisono.errors import MismatchError, UsageError
from unisono.weights.differences import Difference, show_differences
from unisono.weights.layout import Layout
from unisono.weights.patterns import some
from unisono.weights.regions import Cast, Op, Quantize, Region, Scale, Value
from unisono.weights.rules import Rule, Table

__all__ = ["Fit", "fit"]


@dataclass(frozen=True)
class Fit:
    """The receiver's tensors by name (of tied ones the first), each made of regions of the sender's; and their scales.

    `ties` maps every other name of the receiver that arrives to the one that it is tied to.
    """

    tensors: Mapping[str, Value]
    scales: Mapping[str, Scale]
    ties: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that arrive, tied ones too."""
        return (*self.tensors, *self.ties)

    def only(self, names: Collection[str]) -> "Fit":
        """The same for some of the tensors: what a delta leaves to be moved."""
        return replace(self, tensors={name: value for name, value in self.tensors.items() if name in names})

    @property
    def nbytes(self) -> int:
        """Bytes of all whole tensors."""
        return sum(prod(value.shape) * value.dtype.itemsize for value in self.tensors.values())

    def sources(self) -> set[str]:
        """The sender's names that are read."""
        regions = [r for value in self.tensors.values() for r in value.regions]
        used = {r.source for r in regions}
        return {name for name in used if name not in self.scales} | {
            r.source for key in used if key in self.scales for r in self.scales[key].value.regions
        }


def fit(sender: Layout, receiver: Layout, rules: Sequence[Rule] = (), who: str = "the receiver") -> Fit:
    """Map a sender's tensors to a receiver's.

    who: the receiver in messages, e.g. `replica gen-1`. Raises UsageError for a rule that does not suit and for rules
    that leave nothing to update, MismatchError with every difference: names missing and unexpected, shapes, dtypes,
    parts that no rank holds.
    """
    table = Table({name: _whole(sender, name) for name in sender}, receiver.names)
    for rule in rules:
        rule.apply(table)
    found: list[Difference] = []
    tensors: dict[str, Value] = {}
    ties: dict[str, str] = {}
    for group in _groups(receiver):
        first = group[0]
        sent = {name: table.values[name] for name in group if name in table.values}
        if not sent:
            if not any(name in table.ignored for name in group):
                found.append(Difference("missing", first, receiver=_kind(receiver, first)))
            continue
        value = next(iter(sent.values()))
        found += [
            Difference("tied", name, sender=_kind_of(other), other=next(iter(sent)))
            for name, other in sent.items()
            if not _same(other, value)
        ]
        made = _suited(value, receiver[first].dtype)
        wanted, got = _kind(receiver, first), _kind_of(made)
        if value.shape != receiver[first].shape:
            found.append(Difference("shape", first, sender=got, receiver=wanted))
        if made.dtype != receiver[first].dtype:
            found.append(Difference("dtype", first, sender=got, receiver=wanted))
        tensors[first] = made._replace(optional=False) if made.optional else made
        ties |= dict.fromkeys(group[1:], first)
    arriving = {value.regions for name, value in table.values.items() if name in receiver}
    found += [
        Difference("unexpected", name, sender=_kind_of(value))
        for name, value in table.values.items()
        if name not in receiver and not value.optional and not (value.regions and value.regions in arriving)
    ]
    if found:
        raise MismatchError(show_differences(found, list(table.values), list(receiver.names), who))
    if table.ignored and not tensors:
        ignoring = ", ".join(dict.fromkeys(map(str, table.ignored.values())))
        raise UsageError(
            f"{ignoring}: nothing is left to update: the sender has {some(sender.names)}, {who} has "
            f"{some(receiver.names)}: make the pattern narrower"
        )
    fitted = Fit(tensors, table.scales, ties)
    _check_held(sender, fitted)
    return fitted


def _whole(sender: Layout, name: str) -> Value:
    """A sender's tensor as rules find it; of tied ones the first is read."""
    tensor = sender[name]
    zero = (0,) * len(tensor.shape)
    whole = Region(zero, tensor.shape, sender.ties.get(name, name), zero, tuple(range(len(zero))))
    return Value(tensor.shape, tensor.dtype, (whole,))


def _groups(receiver: Layout) -> list[list[str]]:
    """Names of the receiver that are one tensor, the first of them first."""
    groups: dict[str, list[str]] = {}
    for name in receiver:
        groups.setdefault(receiver.ties.get(name, name), []).append(name)
    return list(groups.values())


def _same(a: Value, b: Value) -> bool:
    """True for the same elements, or none."""
    return (a.regions == b.regions or not prod(a.shape)) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _kind(layout: Layout, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    return layout[name].dtype, layout[name].shape


def _kind_of(value: Value) -> tuple[torch.dtype, tuple[int, ...]]:
    return value.dtype, value.shape


def _suited(value: Value, dtype: torch.dtype) -> Value:
    """The value with its casts to the receiver's dtype made definite."""
    if not any(op == Cast(None) for region in value.regions for op in region.ops):
        return value
    to = dtype if dtype.is_floating_point and value.dtype.is_floating_point else value.dtype
    return value._replace(dtype=to, regions=tuple(r._replace(ops=_definite(r.ops, to)) for r in value.regions))


def _definite(ops: tuple[Op, ...], dtype: torch.dtype) -> tuple[Op, ...]:
    """Operations without casts to an unknown dtype: those before a quantize are left out, it decides the dtype."""
    last = max((i for i, op in enumerate(ops) if isinstance(op, Quantize)), default=-1)
    return tuple(Cast(dtype) if op == Cast(None) else op for i, op in enumerate(ops) if op != Cast(None) or i > last)


def _check_held(sender: Layout, fitted: Fit) -> None:
    """Raise MismatchError if some part of a tensor that is sent is held by no rank."""
    wrong = []
    for name in sorted(fitted.sources()):
        tensor = sender[name]
        boxes = {box[:2] for part in tensor.parts for box in part}
        covered = covered_count(list(boxes))
        if covered < prod(tensor.shape):
            lost = prod(tensor.shape) - covered
            wrong.append(f"{name}: {lost} of {prod(tensor.shape)} elements are held by no rank of the sender")
    if wrong:
        raise MismatchError("the sender does not hold all that it should send: " + "; ".join(wrong))


def covered_count(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """Elements in the union of boxes (offsets, shape)."""
    if len(boxes) <= 1:
        return sum(prod(shape) for _, shape in boxes)
    rank = len(boxes[0][0])
    if rank == 0:
        return 1
    edges = sorted({edge for offsets, shape in boxes for edge in (offsets[0], offsets[0] + shape[0])})
    count = 0
    for low, high in pairwise(edges):
        inside = {
            (offsets[1:], shape[1:]) for offsets, shape in boxes if offsets[0] <= low and high <= offsets[0] + shape[0]
        }
        count += (high - low) * covered_count(sorted(inside)) if inside else 0
    return count
