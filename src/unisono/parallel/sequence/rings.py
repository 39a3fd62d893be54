"""Rings of ranks, and rings of rings, whose blocks travel while something is computed; torch has no such call.

One group is one ring. A pair of groups (inner, outer) is a ring of rings: a block goes round the inner ring, the fast
one, while the next inner ring's block is on its way over the outer, which so has a whole inner round's time (Gu et al.
2024, LoongTrain, "double ring"). Ranks are counted outer first: rank = outer rank · inner size + inner rank.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.shards import Group, Place, place
from unisono.torch_names import all_gather_single

__all__ = ["Groups", "Homeward", "Rings"]

Groups = Group | tuple[Group, Group]
Pending = Callable[[], Tensor]


class _Ring:
    """One group as a ring; `alone` is the ring of one rank that needs no group."""

    def __init__(self, group: Group, alone: bool = False) -> None:
        self.group = group
        self.place = Place(0, 1) if alone else place(group)

    def pass_on(self, block: Tensor, arriving: Sequence[int]) -> Pending:
        """Begin to send a block to the next rank and to receive one of shape `arriving` from the one before.

        The function returned waits for both and gives what came. The block must not be changed before.
        """
        rank, world_size = self.place
        if world_size == 1:
            return lambda: block
        ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
        leaving, came = block.contiguous(), block.new_empty(arriving)
        operations = [
            dist.P2POp(dist.isend, leaving, group=self.group, group_peer=ahead),
            dist.P2POp(dist.irecv, came, group=self.group, group_peer=behind),
        ]
        works = dist.batch_isend_irecv(operations)

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return came

        return finish

    def join(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, stacked in rank order."""
        everyone = tensor.new_empty(self.place.world_size, *tensor.shape)
        if self.place.world_size == 1:
            return everyone.copy_(tensor)
        all_gather_single(everyone.flatten(0, 1), tensor, group=self.group)
        return everyone


class Rings:
    """A ring, or a ring of rings, as one rank sees it. The blocks are [..., length, width], their lengths by rank."""

    def __init__(self, groups: Groups) -> None:
        inner, outer = groups if isinstance(groups, tuple) else (groups, None)
        self.inner, self.outer = _Ring(inner), _Ring(outer, alone=not isinstance(groups, tuple))
        self.world_size = self.inner.place.world_size * self.outer.place.world_size
        self.rank = self.source(0, 0)

    def source(self, outer_step: int, inner_step: int) -> int:
        """The rank whose block this rank holds after so many steps of the outer and of the inner ring."""
        outer, inner = self.outer.place, self.inner.place
        return (outer.rank - outer_step) % outer.world_size * inner.world_size + (
            inner.rank - inner_step
        ) % inner.world_size

    def ask(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The numbers that each rank passes, in rank order: one small all_gather per ring."""
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        everyone: list[list[int]] = self.outer.join(self.inner.join(mine)).flatten(0, 1).tolist()
        return everyone

    def circulate(self, block: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Every rank's block and whose it is, this rank's own first; the next is on its way while one is used."""
        rounds, steps = self.outer.place.world_size, self.inner.place.world_size
        for outer_step in range(rounds):
            if outer_step + 1 < rounds:
                next_round = self.outer.pass_on(block, self.shape(block, lengths, outer_step + 1, 0))
            for inner_step in range(steps):
                if inner_step + 1 < steps:
                    following = self.inner.pass_on(block, self.shape(block, lengths, outer_step, inner_step + 1))
                yield self.source(outer_step, inner_step), block
                if inner_step + 1 < steps:
                    block = following()
            if outer_step + 1 < rounds:
                block = next_round()

    def shape(self, block: Tensor, lengths: Sequence[int], outer_step: int, inner_step: int) -> list[int]:
        """The shape of the block that is here after so many steps."""
        return [*block.shape[:-2], lengths[self.source(outer_step, inner_step)], block.shape[-1]]


class Homeward:
    """Sums that follow the blocks of `Rings.circulate` round the rings and end on the rank whose block it is.

    `add` is called once per block, in that order, with this rank's contribution; a sum travels while the next
    contribution is computed.
    """

    def __init__(self, rings: Rings, lengths: Sequence[int]) -> None:
        self.rings, self.lengths = rings, lengths
        self.step = 0
        self.inner: Pending | None = None
        self.outer: Pending | None = None

    def add(self, contribution: Tensor) -> None:
        """Add to the sum for the present block and hand it on."""
        rings, lengths = self.rings, self.lengths
        outer_step, inner_step = divmod(self.step, rings.inner.place.world_size)
        self.step += 1
        total = contribution if self.inner is None else self.inner().add_(contribution)
        self.inner = rings.inner.pass_on(total, rings.shape(total, lengths, outer_step, inner_step + 1))
        if inner_step + 1 == rings.inner.place.world_size:
            total = self.inner() if self.outer is None else self.outer().add_(self.inner())
            self.inner = None
            self.outer = rings.outer.pass_on(total, rings.shape(total, lengths, outer_step + 1, 0))

    def arrived(self) -> Tensor:
        """The sum of all ranks' contributions for this rank's block."""
        assert self.outer is not None, "add() has not been called for every block"
        return self.outer()
