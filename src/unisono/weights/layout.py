"""Layouts: which box of every tensor each rank of a side holds, as a value with a text form.

A *box* is a block of a whole tensor: its offsets there, its shape, and where it starts in the rank's own tensor. A
rank's part of a tensor is a tuple of boxes: one for rows or columns, several for blocks side by side (query, key and
value in one matrix, each cut over the ranks), none where the rank holds nothing of it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.errors import MismatchError, UsageError
from unisono.weights.arguments import whole_number
from unisono.weights.sharding import Shape, Shard, Sharding, has_dim, shards_of

__all__ = ["Box", "Layout", "Part", "TensorLayout", "dtype_name", "dtype_of", "merge"]


class Box(NamedTuple):
    """A block of a tensor: offsets in the whole, shape, and `at`, its offsets in the rank's own tensor."""

    offsets: Shape
    shape: Shape
    at: Shape


Part = tuple[Box, ...]


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a layout: shape of the whole, dtype, and the part of each rank, in rank order.

    `cut` is set in what one rank finds by itself of a tensor whose whole it cannot see; `shape` is then this rank's.
    """

    shape: Shape
    dtype: torch.dtype
    parts: tuple[Part, ...]
    cut: Shard | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def nbytes_of(self, rank: int) -> int:
        """Bytes that a rank holds."""
        return sum(math.prod(box.shape) for box in self.parts[rank]) * self.dtype.itemsize


def whole_part(shape: Shape) -> Part:
    """The part of a rank that holds the whole tensor."""
    return cut_part(shape, 0, [(0, shape[0], 0)]) if shape else (Box((), (), ()),)


def cut_part(shape: Shape, dim: int, runs: Sequence[tuple[int, int, int]]) -> Part:
    """The part of a rank that holds runs (start, length, start in its own tensor) of one dim and all of the others."""
    zero = (0,) * len(shape)
    head, tail = zero[:dim], zero[dim + 1 :]
    return tuple(
        Box((*head, start, *tail), (*shape[:dim], length, *shape[dim + 1 :]), (*head, at, *tail))
        for start, length, at in runs
        if length and math.prod(shape)
    )


def shard_parts(shape: Shape, shard: Shard, lengths: Sequence[Sequence[int]]) -> tuple[Part, ...]:
    """The parts of all ranks when block b of the shard's dim is cut into lengths[b]."""
    dim, parts = shard.dim % len(shape), []
    for rank in range(len(lengths[0])):
        runs, start, at = [], 0, 0
        for block in lengths:
            runs.append((start + sum(block[:rank]), block[rank], at))
            start, at = start + sum(block), at + block[rank]
        parts.append(cut_part(shape, dim, runs))
    return tuple(parts)


class Layout:
    """What the ranks of one side hold: for each name the shape of the whole, the dtype, and every rank's part.

    `layout[name]` is a TensorLayout. `ties` maps a name to the earlier one that is the same tensor.
    """

    def __init__(
        self, world_size: int, tensors: Mapping[str, TensorLayout], ties: Mapping[str, str] | None = None
    ) -> None:
        self.world_size = world_size
        self.tensors = dict(tensors)
        self.ties = dict(ties or {})
        if world_size < 1:
            raise UsageError(f"a layout needs at least 1 rank, got world_size={world_size}")
        for name, tensor in self.tensors.items():
            if len(tensor.parts) != world_size:
                raise UsageError(f"{name} has parts of {len(tensor.parts)} ranks in a layout of {world_size}")

    @property
    def names(self) -> tuple[str, ...]:
        """All names, tied ones too, in the order of the source."""
        return tuple(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all whole tensors; tied ones count once."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.ties)

    def nbytes_of(self, rank: int) -> int:
        """Bytes that a rank holds; tied tensors count once."""
        return sum(tensor.nbytes_of(rank) for name, tensor in self.tensors.items() if name not in self.ties)

    def __getitem__(self, name: str) -> TensorLayout:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        mine, theirs = (self.world_size, self.ties), (other.world_size, other.ties)
        return mine == theirs and self.tensors == other.tensors

    def __hash__(self) -> int:
        return hash((self.world_size, self.names))

    def __repr__(self) -> str:
        return f"<layout of {len(self.tensors)} tensors, {self.nbytes} bytes over {self.world_size} ranks>"

    def split(self, world_size: int, shard: Sharding | None = None) -> "Layout":
        """This layout's whole tensors over other ranks: cut where a pattern of `shard` matches, else whole on each.

        shard: pattern → dim or Shard; the first pattern that matches counts. A tensor without that dim stays whole.
        Raises UsageError for a number of ranks below 1, a pattern without a match, or blocks that do not add up.
        """
        whole_number(world_size, "world_size", 1)
        declared, tensors = shards_of(self.names, shard), {}
        for name, tensor in self.tensors.items():
            cut = declared.get(name)
            parts: tuple[Part, ...] = (whole_part(tensor.shape),) * world_size
            if cut is not None and has_dim(tensor.shape, cut):
                parts = shard_parts(tensor.shape, cut, cut.blocks(tensor.shape[cut.dim], world_size, name))
            tensors[name] = TensorLayout(tensor.shape, tensor.dtype, parts)
        return Layout(world_size, tensors, self.ties)

    def save(self, path: str | Path) -> None:
        """Write the JSON form. Raises UsageError if the file cannot be written."""
        try:
            Path(path).write_text(self.to_text(), encoding="utf-8")
        except (OSError, TypeError) as problem:
            raise UsageError(f"cannot write {path}: {getattr(problem, 'strerror', problem)}") from None

    @staticmethod
    def load(path: str | Path) -> "Layout":
        """Read what `save` wrote. Raises UsageError if it cannot be read."""
        try:
            return Layout.from_text(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError) as problem:
            raise UsageError(f"cannot read {path}: {getattr(problem, 'strerror', problem)}") from None
        except (UsageError, UnicodeDecodeError) as problem:
            raise UsageError(f"{path}: {problem}") from None

    def to_text(self) -> str:
        """The JSON form, a line per tensor."""
        lines = [f"  {json.dumps(name)}: {json.dumps(_tensor_to_json(t))}" for name, t in self.tensors.items()]
        body = "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
        ties = json.dumps(self.ties)
        return f'{{"layout": 1, "world_size": {self.world_size}, "ties": {ties},\n "tensors": {body}}}\n'

    @staticmethod
    def from_text(text: str) -> "Layout":
        """The layout that `to_text` described. Raises UsageError if it cannot be read."""
        try:
            data = json.loads(text)
            if data["layout"] != 1:
                raise UsageError(f"a layout of version {data['layout']!r}, expected 1: save it with this unisono")
            ranks = int(data["world_size"])
            tensors = {name: _tensor_from_json(fields, ranks) for name, fields in data["tensors"].items()}
            ties = {str(a): str(b) for a, b in data["ties"].items()}
            if not set(ties.values()) | set(ties) <= set(tensors):
                raise ValueError("ties of names that are not there")
            return Layout(ranks, tensors, ties)
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise UsageError(f"not a layout ({type(problem).__name__}: {problem}): expected what save wrote") from None


def _tensor_to_json(tensor: TensorLayout) -> dict[str, Any]:
    fields: dict[str, Any] = {"shape": tensor.shape, "dtype": dtype_name(tensor.dtype)}
    if tensor.cut is not None:
        fields["cut"] = [tensor.cut.dim, tensor.cut.parts]
    if any(part != whole_part(tensor.shape) for part in tensor.parts):
        fields["parts"] = tensor.parts
    return fields


def _tensor_from_json(fields: dict[str, Any], world_size: int) -> TensorLayout:
    shape = _shape(fields["shape"])
    parts: tuple[Part, ...] = (whole_part(shape),) * world_size
    if "parts" in fields:
        parts = tuple(tuple(_box(shape, *box) for box in part) for part in fields["parts"])
    cut = fields.get("cut")
    shard = None if cut is None else Shard(int(cut[0]), cut[1] if isinstance(cut[1], int) else tuple(cut[1]))
    return TensorLayout(shape, dtype_of(fields["dtype"]), parts, shard)


def _shape(numbers: Any) -> Shape:
    shape = tuple(map(int, numbers))
    if any(number < 0 for number in shape):
        raise ValueError(f"a shape or offset below zero, {list(shape)}")
    return shape


def _box(whole: Shape, offsets: Any, shape: Any, at: Any) -> Box:
    box = Box(_shape(offsets), _shape(shape), _shape(at))
    ends = zip(box.offsets, box.shape, whole, strict=True)
    if len(box.at) != len(whole) or any(start + length > total for start, length, total in ends):
        raise ValueError(f"a box at {list(box.offsets)} of {list(box.shape)} outside of {list(whole)}")
    return box


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. Raises UsageError for a name that torch does not have."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"unknown dtype {name!r}: expected one of torch's, such as float32")
    return dtype


def merge(layouts: Sequence[Layout]) -> Layout:
    """The layout of a side from what each of its ranks found, in rank order.

    The r-th is what rank r says of itself: a layout of one rank, or one of all of them, of which its own part counts.
    Raises MismatchError, with the ranks and what each has, if they disagree on a shape, a dtype or a cut.
    """
    count, names = len(layouts), dict.fromkeys(name for each in layouts for name in each)
    tensors, wrong = {}, []
    for name in names:
        held = {rank: _own(layouts[rank], name, rank, count) for rank in range(count) if name in layouts[rank]}
        problem = _at_odds(name, held)
        if problem:
            wrong.append(problem)
            continue
        try:
            tensors[name] = _merged(name, held, count)
        except UsageError as problem:
            wrong.append(str(problem))
    if wrong:
        raise MismatchError("the ranks of a side do not agree on what they hold: " + "; ".join(wrong))
    ties = {a: b for each in layouts for a, b in each.ties.items()}
    agreed = {a: b for a, b in ties.items() if all(each.ties.get(a) == b for each in layouts if a in each)}
    return Layout(count, tensors, agreed)


def _own(layout: Layout, name: str, rank: int, count: int) -> TensorLayout:
    """What rank `rank` of `count` says of itself, as a layout of one rank."""
    if layout.world_size not in (1, count):
        raise MismatchError(
            f"rank {rank} has a layout of {layout.world_size} ranks, but its side has {count}: "
            "expected a layout of this rank alone or of all of them"
        )
    tensor = layout[name]
    return replace(tensor, parts=(tensor.parts[0 if layout.world_size == 1 else rank],))


def _at_odds(name: str, held: Mapping[int, TensorLayout]) -> str:
    """What the ranks disagree on, in words."""
    first = next(iter(held.values()))
    kinds = {(t.dtype, t.cut, _uncut(t)) for t in held.values()}
    if len(kinds) == 1:
        return ""
    each = ", ".join(f"rank {rank} has {_shown(t)}" for rank, t in held.items())
    if len({t.dtype for t in held.values()}) > 1:
        return f"{name}: {each}; give it one dtype on all ranks"
    if len({t.cut for t in held.values()}) > 1:
        return f"{name}: {each}; declare it alike on all ranks, by shard="
    dims = [i for i, (a, b) in enumerate(zip(first.shape, list(held.values())[-1].shape, strict=False)) if a != b]
    dim = dims[0] if dims else 0
    return f"{name}: {each}; if they are parts of one tensor, declare it: shard={{{name!r}: {dim}}}"


def _shown(tensor: TensorLayout) -> str:
    cut = f", part of a tensor cut in dim {tensor.cut.dim}" if tensor.cut is not None else ""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{cut}"


def _uncut(tensor: TensorLayout) -> Shape:
    """The shape without the dim that is cut, on which all ranks must agree."""
    if tensor.cut is None:
        return tensor.shape
    dim = tensor.cut.dim % len(tensor.shape)
    return tensor.shape[:dim] + tensor.shape[dim + 1 :]


def _merged(name: str, held: Mapping[int, TensorLayout], count: int) -> TensorLayout:
    first = next(iter(held.values()))
    if first.cut is None:
        parts = tuple(held[rank].parts[0] if rank in held else () for rank in range(count))
        return TensorLayout(first.shape, first.dtype, parts)
    dim = first.cut.dim % len(first.shape)
    own = [tensor.shape[dim] for tensor in held.values()]
    shape = (*first.shape[:dim], sum(own), *first.shape[dim + 1 :])
    lengths = _lengths(name, first.cut, own)
    cut = iter(shard_parts(shape, first.cut, lengths))
    return TensorLayout(shape, first.dtype, tuple(next(cut) if rank in held else () for rank in range(count)))


def _lengths(name: str, shard: Shard, own: Sequence[int]) -> list[Shape]:
    """The lengths of every block at each rank, of which the ranks hold `own` elements in all."""
    if isinstance(shard.parts, int):
        if any(length % shard.parts for length in own):
            raise UsageError(f"{name}: ranks hold {list(own)} elements of dim {shard.dim}, not {shard.parts} blocks")
        return [tuple(length // shard.parts for length in own)] * shard.parts
    lengths = shard.blocks(sum(own), len(own), name)
    expected = [sum(block[rank] for block in lengths) for rank in range(len(own))]
    if expected != list(own):
        raise UsageError(
            f"{name}: ranks hold {list(own)} elements of dim {shard.dim}, blocks {shard.parts} give {expected}"
        )
    return lengths
