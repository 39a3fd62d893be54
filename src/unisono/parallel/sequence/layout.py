"""Which positions of a sequence each rank holds, for lengths that the ranks do not divide, which torch's refuses.

    contiguous, 4 ranks    0 0 1 1 2 2 3 3         zigzag, 4 ranks    0 1 2 3 3 2 1 0

Under a causal mask the first positions see few keys and the last all of them. Cut contiguously, the last rank has n
times the work of the first, and all wait for it; in zigzag each rank holds one chunk from the front and its mirror
image from the back, and in every step of the ring all ranks have the same work: half a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.parallel.sequence.rings import Groups, Rings
from unisono.parallel.shards import split_evenly
from unisono.parallel.tensor.regions import gather_from_region, scatter_to_region

__all__ = ["Layout", "Seen", "sequence_positions", "shard_sequence", "unshard_sequence"]

KINDS = ("zigzag", "contiguous")


class Seen(NamedTuple):
    """The part of a block of queries that sees a part of a block of keys; `causal`: position by position."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Layout:
    """A sequence of `total` positions over `world_size` ranks. Raises UsageError for another kind than those two."""

    kind: str
    total: int
    world_size: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"layout = {self.kind!r}: must be one of {', '.join(KINDS)}")

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The lengths of a rank's stretches of neighbouring positions."""
        if self.kind == "contiguous":
            return (split_evenly(self.total, self.world_size)[rank],)
        lengths = split_evenly(self.total, 2 * self.world_size)
        return lengths[rank], lengths[-1 - rank]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions each rank holds."""
        return tuple(sum(self.chunks(rank)) for rank in range(self.world_size))

    def order(self) -> Tensor:
        """The positions in the order in which the ranks hold them, rank 0's first: int64 [total]."""
        if self.kind == "contiguous":
            return torch.arange(self.total)
        chunks = torch.split(torch.arange(self.total), list(split_evenly(self.total, 2 * self.world_size)))
        return torch.cat([chunk for rank in range(self.world_size) for chunk in (chunks[rank], chunks[-1 - rank])])

    def seen(self, rank: int, source: int) -> Seen | None:
        """The part of another rank's keys that a rank's queries see under the causal mask; None: nothing."""
        everything = slice(None)
        if rank == source:
            return Seen(everything, everything, True)
        if self.kind == "contiguous":
            return Seen(everything, everything, False) if source < rank else None
        if source < rank:  # its front chunk lies before both of ours, its back chunk behind
            return Seen(everything, slice(0, self.chunks(source)[0]), False)
        return Seen(slice(self.chunks(rank)[0], None), everything, False)  # both lie before our back chunk


def sequence_positions(total: int, group: Groups = None, layout: str = "zigzag") -> Tensor:
    """The positions that this rank holds of a sequence of `total`, ascending: int64 [own length].

    For position embeddings and rotary angles. Raises UsageError for an unknown layout.
    """
    rings = Rings(group)
    cut = Layout(layout, total, rings.world_size)
    return torch.split(cut.order(), list(cut.lengths))[rings.rank]


def shard_sequence(tensor: Tensor, dim: int, group: Groups = None, layout: str = "zigzag") -> Tensor:
    """This rank's part of `dim` of a tensor that every rank holds; any length, no padding.

    `group` as in `ring_attention`. Gradients are gathered from all ranks. Raises UsageError for an unknown layout.
    """
    rings = Rings(group)
    cut = Layout(layout, tensor.shape[dim], rings.world_size)
    ordered = tensor.index_select(dim, cut.order().to(tensor.device))
    if not isinstance(group, tuple):
        return scatter_to_region(ordered, dim, group, cut.lengths)
    inner, outer = group
    mine = scatter_to_region(ordered, dim, outer, [sum(part) for part in _by_outer(cut, rings)])
    return scatter_to_region(mine, dim, inner, _by_outer(cut, rings)[rings.outer.place.rank])


def unshard_sequence(part: Tensor, dim: int, group: Groups = None, layout: str = "zigzag") -> Tensor:
    """The whole sequence of all ranks' parts, in its order, on every rank; the inverse of `shard_sequence`.

    Its gradient must be the same on every rank, as for `gather_from_region`. Raises UsageError, on every rank, if the
    ranks' lengths are not those of the layout.
    """
    rings = Rings(group)
    lengths = [row[0] for row in rings.ask([part.shape[dim]], part.device)]
    cut = Layout(layout, sum(lengths), rings.world_size)
    if lengths != list(cut.lengths):
        raise UsageError(f"the ranks hold {lengths} positions, but {layout} is {list(cut.lengths)}: use shard_sequence")
    if isinstance(group, tuple):
        inner, outer = group
        parts = _by_outer(cut, rings)
        whole = gather_from_region(part, dim, inner, parts[rings.outer.place.rank])
        whole = gather_from_region(whole, dim, outer, [sum(lengths) for lengths in parts])
    else:
        whole = gather_from_region(part, dim, group, lengths)
    return whole.index_select(dim, cut.order().argsort().to(part.device))


def _by_outer(cut: Layout, rings: Rings) -> list[list[int]]:
    """The lengths of every inner ring's ranks."""
    size = rings.inner.place.world_size
    return [list(cut.lengths[start : start + size]) for start in range(0, rings.world_size, size)]
