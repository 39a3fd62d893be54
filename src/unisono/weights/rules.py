"""Rules that map senders' names and tensors to receivers': values with a text form, applied in order.

A rule turns a table of names and `Value`s into another. Nothing is read or moved here: fuse, split and transpose say
where blocks lie, cast and quantize what is done to elements when they are packed.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch

from unisono.errors import UsageError
from unisono.weights.arguments import whole, wholes
from unisono.weights.layout import dtype_name, dtype_of
from unisono.weights.patterns import (
    Pattern,
    captures,
    checked_pattern,
    checked_template,
    expand,
    pattern_from_json,
    pattern_to_json,
    show_pattern,
    some,
)
from unisono.weights.regions import Cast, Quantize, Region, Scale, Value, cut, permuted, shifted

__all__ = [
    "Rule", "Table", "cast", "fuse", "ignore", "load_rules", "quantize", "rename", "rules_from_text", "rules_to_text",
    "split", "tie", "transpose",
]  # fmt: skip

QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass
class Table:
    """The tensors so far by name, the scales that were asked for, and the receiver's names."""

    values: dict[str, Value]
    wanted: Collection[str]
    scales: dict[str, Scale] = field(default_factory=dict)
    ignored: dict[str, "Rule"] = field(default_factory=dict)
    """Names of either side that need not be sent or arrive, each with the rule that said so."""

    def matches(self, pattern: Pattern, rule: "Rule", more: Collection[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
        """The names that a pattern matches, and what its stars stand for.

        Raises UsageError if it matches none of them and none of `more`.
        """
        found = [(name, got) for name in self.values if (got := captures(pattern, name)) is not None]
        if not found and not any(captures(pattern, name) is not None for name in more):
            raise UsageError(f"{rule}: {show_pattern(pattern)} matches no tensor; there are {some(list(self.values))}")
        return found

    def renamed(self, new: dict[str, dict[str, Value]], rule: "Rule") -> None:
        """Put other names and values in the place of each name of `new`. Raises UsageError for a name used twice."""
        values: dict[str, Value] = {}
        for name, value in self.values.items():
            for key, made in new.get(name, {name: value}).items():
                if key in values:
                    raise UsageError(f"{rule}: two tensors would be called {key}: make the pattern narrower")
                values[key] = made
        self.values = values


class Rule:
    """A rule; `str(rule)` is how it is written in Python."""

    name: ClassVar[str]

    def apply(self, table: Table) -> None:
        """Change the table. Raises UsageError if the rule does not suit it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.name}({', '.join(_show(value) for value in self._values())})"

    def _values(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def to_json(self) -> list[Any]:
        """The rule's name and its arguments."""
        return [self.name, *map(_to_json, self._values())]


def _show(value: Any) -> str:
    if isinstance(value, tuple) and value and not isinstance(value[0], int):
        return f"[{', '.join(map(_show, value))}]"
    return show_pattern(value) if isinstance(value, str | re.Pattern) else str(value)


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    return value if isinstance(value, int) or value is None else pattern_to_json(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return dtype_of(value["dtype"])
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    return value if isinstance(value, int) or value is None else pattern_from_json(value)


@dataclass(frozen=True)
class _Rename(Rule):
    old: Pattern
    new: str
    name = "rename"

    def apply(self, table: Table) -> None:
        found = table.matches(self.old, self)
        table.renamed({name: {expand(self.new, got, self.old): table.values[name]} for name, got in found}, self)


@dataclass(frozen=True)
class _Fuse(Rule):
    parts: tuple[Pattern, ...]
    new: str
    dim: int
    name = "fuse"

    def apply(self, table: Table) -> None:
        groups: dict[tuple[str, ...], dict[int, str]] = {}
        for i, pattern in enumerate(self.parts):
            for name, got in table.matches(pattern, self):
                groups.setdefault(got, {})[i] = name
        new: dict[str, dict[str, Value]] = {}
        for got, members in groups.items():
            names = [members[i] for i in sorted(members)]
            if len(members) < len(self.parts):
                lost = [show_pattern(p) for i, p in enumerate(self.parts) if i not in members]
                raise UsageError(f"{self}: {', '.join(names)} has no part for {', '.join(lost)}")
            made = _joined([table.values[name] for name in names], self.dim, f"{self}: {', '.join(names)}")
            new |= {name: {} for name in names} | {names[0]: {expand(self.new, got, self.parts[0]): made}}
        table.renamed(new, self)


def _joined(values: Sequence[Value], dim: int, what: str) -> Value:
    first = values[0]
    dim = _dim(dim, first.shape, what)
    rests = {(v.shape[:dim], v.shape[dim + 1 :], len(v.shape)) for v in values}
    if len(rests) > 1:
        shapes = " and ".join(str(list(v.shape)) for v in values)
        raise UsageError(f"{what}: parts of {shapes} cannot be joined in dim {dim}: the other dims must be equal")
    if len({v.dtype for v in values}) > 1:
        names = " and ".join(dtype_name(v.dtype) for v in values)
        raise UsageError(f"{what}: parts of {names} cannot be joined: cast them to one dtype first")
    regions: list[Region] = []
    at = 0
    for value in values:
        regions += [shifted(region, dim, at) for region in value.regions]
        at += value.shape[dim]
    return Value((*first.shape[:dim], at, *first.shape[dim + 1 :]), first.dtype, tuple(regions))


@dataclass(frozen=True)
class _Split(Rule):
    old: Pattern
    new: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...] | None
    name = "split"

    def apply(self, table: Table) -> None:
        new = {}
        for name, got in table.matches(self.old, self):
            value = table.values[name]
            dim = _dim(self.dim, value.shape, f"{self}: {name}")
            sizes = self._sizes_of(value.shape[dim], name)
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            names = [expand(template, got, self.old) for template in self.new]
            new[name] = {n: _part(value, dim, at, size) for n, at, size in zip(names, starts, sizes, strict=True)}
        table.renamed(new, self)

    def _sizes_of(self, total: int, name: str) -> tuple[int, ...]:
        sizes, parts = self.sizes, len(self.new)
        if sizes is None and total % parts == 0:
            return (total // parts,) * parts
        if sizes is None or sum(sizes) != total or len(sizes) != parts:
            given = f"{parts} equal parts" if sizes is None else f"parts of {' + '.join(map(str, sizes))}"
            raise UsageError(f"{self}: {name} has {total} elements in dim {self.dim}, not {given}: give sizes=")
        return sizes


def _part(value: Value, dim: int, start: int, length: int) -> Value:
    offsets = tuple(start if i == dim else 0 for i in range(len(value.shape)))
    shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
    found = [cut(region, offsets, shape) for region in value.regions]
    return Value(shape, value.dtype, tuple(shifted(region, dim, -start) for region in found if region is not None))


@dataclass(frozen=True)
class _Transpose(Rule):
    pattern: Pattern
    dims: tuple[int, ...]
    name = "transpose"

    def apply(self, table: Table) -> None:
        for name, _ in table.matches(self.pattern, self):
            value = table.values[name]
            dims = tuple(dim % max(len(self.dims), 1) for dim in self.dims)
            if sorted(dims) != list(range(len(value.shape))):
                raise UsageError(f"{self}: {name} has shape {list(value.shape)}: dims must name each of its dims once")
            shape = tuple(value.shape[dim] for dim in dims)
            table.values[name] = Value(shape, value.dtype, tuple(permuted(r, dims) for r in value.regions))


@dataclass(frozen=True)
class _Cast(Rule):
    pattern: Pattern
    dtype: torch.dtype | None
    name = "cast"

    def apply(self, table: Table) -> None:
        for name, _ in table.matches(self.pattern, self):
            value = table.values[name]
            if self.dtype is not None or value.dtype.is_floating_point:
                table.values[name] = _with_op(value, Cast(self.dtype), self.dtype or value.dtype)


def _with_op(value: Value, op: Cast | Quantize, dtype: torch.dtype) -> Value:
    return value._replace(dtype=dtype, regions=tuple(r._replace(ops=(*r.ops, op)) for r in value.regions))


@dataclass(frozen=True)
class _Quantize(Rule):
    pattern: Pattern
    dtype: torch.dtype
    scale: str
    dim: int | None
    name = "quantize"

    def apply(self, table: Table) -> None:
        new = {}
        for name, got in table.matches(self.pattern, self):
            value = table.values[name]
            if not value.dtype.is_floating_point:
                raise UsageError(f"{self}: {name} is {dtype_name(value.dtype)}: only floating tensors have scales")
            axis = None if self.dim is None else _dim(self.dim, value.shape, f"{self}: {name}")
            scale_name = expand(self.scale, got, self.pattern)
            scale = Scale(value, axis, QMAX[self.dtype])
            key = "\0" + blake2b(repr(scale).encode(), digest_size=16).hexdigest()  # no tensor is called so
            table.scales[key] = scale
            regions = tuple(
                r._replace(ops=(*r.ops, Quantize(self.dtype, key, axis, 0 if axis is None else r.offsets[axis])))
                for r in value.regions
            )
            zero = (0,) * len(scale.shape)
            whole = Region(zero, scale.shape, key, zero, tuple(range(len(zero))))
            made = Value(scale.shape, torch.float32, (whole,) if prod(scale.shape) else ())
            new[name] = {name: value._replace(dtype=self.dtype, regions=regions), scale_name: made}
        table.renamed(new, self)


@dataclass(frozen=True)
class _Tie(Rule):
    first: str
    second: Pattern
    name = "tie"

    def apply(self, table: Table) -> None:
        for name, got in table.matches(self.second, self):
            table.values[expand(self.first, got, self.second)] = table.values[name]._replace(optional=True)


@dataclass(frozen=True)
class _Ignore(Rule):
    pattern: Pattern
    name = "ignore"

    def apply(self, table: Table) -> None:
        for name, _ in table.matches(self.pattern, self, table.wanted):
            table.ignored[name] = self
            del table.values[name]
        table.ignored |= {name: self for name in table.wanted if captures(self.pattern, name) is not None}


def _dim(dim: int, shape: tuple[int, ...], what: str) -> int:
    if not -len(shape) <= dim < len(shape):
        raise UsageError(f"{what} has shape {list(shape)} and no dim {dim}")
    return dim % len(shape)


def rename(old: Pattern, new: str) -> Rule:
    """Other names: `rename("module.*", "*")`. Raises UsageError if `new` has more stars than `old`."""
    return _Rename(checked_pattern(old), checked_template(new, old))


def fuse(parts: Sequence[Pattern], new: str, dim: int = 0) -> Rule:
    """Tensors joined in this order along `dim`, of any sizes: `fuse(["*.q.weight", "*.k.weight"], "*.qk.weight")`."""
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise UsageError(f"fuse takes a list of patterns, got {parts!r}")
    return _Fuse(tuple(map(checked_pattern, parts)), checked_template(new, parts[0]), whole(dim, "dim"))


def split(old: Pattern, new: Sequence[str], dim: int = 0, sizes: Sequence[int] | None = None) -> Rule:
    """A tensor as several along `dim`, in this order: equal parts unless `sizes` (elements of dim) says otherwise."""
    if isinstance(new, str) or not isinstance(new, Sequence) or not new:
        raise UsageError(f"split takes a list of names, got {new!r}")
    given = None if sizes is None else wholes(sizes, "sizes")
    if given is not None and min(given, default=0) < 0:
        raise UsageError(f"sizes={given}: expected parts of at least 0 elements")
    return _Split(checked_pattern(old), tuple(checked_template(name, old) for name in new), whole(dim, "dim"), given)


def transpose(pattern: Pattern, dims: Sequence[int] = (1, 0)) -> Rule:
    """Permuted: dim i of the receiver's tensor is dim dims[i] of the sender's."""
    return _Transpose(checked_pattern(pattern), wholes(dims, "dims"))


def cast(pattern: Pattern = "*", dtype: torch.dtype | None = None) -> Rule:
    """Another dtype, by torch's `.to`; None: the receiver's, where both are floating."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype={dtype!r}: expected one of torch's, such as torch.bfloat16, or None")
    return _Cast(checked_pattern(pattern), dtype)


def quantize(pattern: Pattern, dtype: torch.dtype, scale: str, dim: int | None = 0) -> Rule:
    """x / scale in dtype (torch.int8, float8_e4m3fn, float8_e5m2), and the scales as a float32 tensor named `scale`.

    scale: max|x| / qmax (127, 448, 57344) over all dims but `dim`, which keep size 1, or over all (None: no dims); 1
    where that is 0. int8 is rounded to nearest even and clamped, float8 clamped.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in QMAX:
        raise UsageError(f"quantize to {dtype}: expected one of {', '.join(map(str, QMAX))}")
    return _Quantize(
        checked_pattern(pattern), dtype, checked_template(scale, pattern), None if dim is None else whole(dim, "dim")
    )


def tie(first: str, second: Pattern) -> Rule:
    """The receiver's tensor `first` is the sender's `second`: `tie("lm_head.weight", "embed.weight")`."""
    return _Tie(checked_template(first, second), checked_pattern(second))


def ignore(pattern: Pattern) -> Rule:
    """Names that need not be sent and need not arrive."""
    return _Ignore(checked_pattern(pattern))


_KINDS: dict[str, Any] = {
    each.__name__: each for each in (rename, fuse, split, transpose, cast, quantize, tie, ignore)
}  # fmt: skip


def rules_to_text(rules: Sequence[Rule]) -> str:
    """JSON: a list of [rule, arguments ...], a rule per line."""
    return "[" + ",\n ".join(json.dumps(rule.to_json()) for rule in rules) + "]\n"


def rules_from_text(text: str) -> tuple[Rule, ...]:
    """The rules that rules_to_text described. Raises UsageError naming the rule that cannot be read."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"not JSON ({problem}): expected a list such as {_EXAMPLE}") from None
    if not isinstance(listed, list):
        raise UsageError(f"expected a list of rules such as {_EXAMPLE}")
    return tuple(map(_rule, listed))


_EXAMPLE = '[["rename", "model.*", "*"]]'


def _rule(data: Any) -> Rule:
    if not isinstance(data, list) or not data or str(data[0]) not in _KINDS:
        raise UsageError(f"not a rule: {data!r}; expected a list that begins with one of {', '.join(_KINDS)}")
    try:
        made: Rule = _KINDS[data[0]](*map(_from_json, data[1:]))
    except (TypeError, AttributeError, UsageError) as problem:
        raise UsageError(f"not a rule: {data!r} ({problem})") from None
    return made


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Rules of a JSON file. Raises UsageError if it cannot be read."""
    try:
        return rules_from_text(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot read {path}: {problem.strerror}") from None
    except (UsageError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: {problem}") from None
