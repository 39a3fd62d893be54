"""What a caller declares of tensors that are this rank's part of one: patterns of names, and how those are cut."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.errors import UsageError
from unisono.parallel.shards import split_evenly
from unisono.weights.arguments import whole, wholes
from unisono.weights.patterns import first_match

__all__ = ["Shape", "Shard", "Sharding", "check_sharding", "has_dim", "shards_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A cut of dim `dim` over the ranks of a side, like `torch.tensor_split`.

    parts: how many equal blocks lie side by side in `dim`, or their sizes; every block is cut, and each rank holds its
    share of every one. Raises UsageError if a number is out of range.
    """

    dim: int
    parts: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        whole(self.dim, "dim of a Shard")
        if isinstance(self.parts, bool) or not isinstance(self.parts, int):
            object.__setattr__(self, "parts", wholes(self.parts, "parts of a Shard"))
        sizes = (self.parts,) if isinstance(self.parts, int) else self.parts
        if not sizes or min(sizes) < (1 if isinstance(self.parts, int) else 0):
            raise UsageError(f"parts of a Shard must be a count of at least 1 or sizes, got {self.parts!r}")

    def sizes(self, total: int, name: str) -> Shape:
        """The sizes of the blocks in a dim of `total` elements. Raises UsageError if they do not add up to it."""
        if isinstance(self.parts, int):
            if total % self.parts:
                raise UsageError(f"{name}: dim {self.dim} has {total} elements, not {self.parts} equal blocks")
            return (total // self.parts,) * self.parts
        if sum(self.parts) != total:
            blocks = " + ".join(map(str, self.parts))
            raise UsageError(f"{name}: dim {self.dim} has {total} elements, but blocks of {blocks}: correct parts=")
        return self.parts

    def blocks(self, total: int, world_size: int, name: str) -> list[Shape]:
        """The lengths that each rank holds of every block, a tuple per block."""
        return [split_evenly(size, world_size) for size in self.sizes(total, name)]


def has_dim(shape: Shape, shard: Shard) -> bool:
    """True if a tensor of this shape has the dim that a shard cuts."""
    return -len(shape) <= shard.dim < len(shape)


Sharding = Mapping[str, "int | Shard"]


def shards_of(names: Sequence[str], shard: Sharding | None) -> dict[str, Shard]:
    """The declared shard of each name that a pattern matches, the first that does.

    Raises UsageError for what is no such mapping, and for a pattern that matches no name.
    """
    check_sharding(shard)
    given = {key: value if isinstance(value, Shard) else Shard(value) for key, value in (shard or {}).items()}
    return first_match(given, names, "shard")


def check_sharding(shard: Any) -> None:
    """None, or a mapping of patterns to dims and `Shard`s."""
    if shard is None:
        return
    if isinstance(shard, Mapping) and all(
        isinstance(key, str | re.Pattern) and isinstance(dim, int | Shard) and not isinstance(dim, bool)
        for key, dim in shard.items()
    ):
        return
    raise UsageError(f"shard={shard!r}: expected a mapping of patterns to dims or Shards, such as {{'*.up.weight': 0}}")
