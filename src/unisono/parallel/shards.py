"""Splits of a tensor that give every rank a share; DTensor splits like torch.chunk, which may leave ranks without one.

A dim of `total` elements over n ranks is cut like `torch.tensor_split`: in rank order, into parts whose lengths differ
by at most one, the longer ones first. So a size that the number of ranks does not divide needs no padding: nothing is
trained, sent or saved but what the model has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.torch_names import all_gather_single

__all__ = [
    "Group",
    "Lengths",
    "Place",
    "Sharded",
    "Split",
    "apply",
    "lengths_of_part",
    "lengths_of_whole",
    "own_part",
    "place",
    "split_evenly",
]

Group = dist.ProcessGroup | None
Lengths = Sequence[int] | None


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply`, whose result torch's types leave open: one tensor, with its place in the graph."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class Place(NamedTuple):
    """The rank of this process in a group, and its size."""

    rank: int
    world_size: int


def place(group: Group) -> Place:
    """This process's rank in the group (None: the default group), and how many there are.

    Raises UsageError if the process is not a member.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the group {dist.get_process_group_ranks(group)}: "
            "pass the group of which this rank is a member"
        )
    return Place(rank, dist.get_world_size(group))


def split_evenly(total: int, world_size: int, what: str = "") -> tuple[int, ...]:
    """The number of elements each rank holds, in rank order; they add up to `total` and differ by at most one.

    With `what` (the name of the thing that is split) each rank must get at least one: raises UsageError otherwise.
    """
    if what and total < world_size:
        raise UsageError(
            f"{what} = {total} cannot be split over {world_size} ranks: each needs one at least; use fewer ranks"
        )
    short, longer = divmod(total, world_size)
    return tuple(short + (rank < longer) for rank in range(world_size))


def own_part(tensor: Tensor, dim: int, lengths: Sequence[int], rank: int) -> Tensor:
    """A view of the part of `dim` that a rank holds."""
    return tensor.narrow(dim, sum(lengths[:rank]), lengths[rank])


def _ask_lengths(tensor: Tensor, dim: int, group: Group) -> tuple[int, ...]:
    """The number of elements of `dim` each rank passes, in rank order: one small all_gather (8 bytes per dim and rank).

    The ranks' tensors must have the same number of dims. Raises UsageError, on every rank, if the other dims differ.
    """
    mine = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
    everyone = mine.new_empty(place(group).world_size * tensor.dim())
    all_gather_single(everyone, mine, group=group)
    shapes: list[list[int]] = everyone.view(-1, tensor.dim()).tolist()
    dim %= tensor.dim()
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        table = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
        raise UsageError(f"the ranks' parts may differ in dim {dim} only, but here are {table}")
    return tuple(shape[dim] for shape in shapes)


def lengths_of_whole(tensor: Tensor, dim: int, lengths: Lengths, group: Group) -> Sequence[int]:
    """The lengths in which the ranks are to get `dim` of a tensor at hand; None: by `split_evenly`.

    Raises UsageError if they do not add up to it, or are not one per rank.
    """
    lengths = split_evenly(tensor.shape[dim], place(group).world_size) if lengths is None else lengths
    _check_count(lengths, group)
    if sum(lengths) != tensor.shape[dim]:
        raise UsageError(
            f"lengths {list(lengths)} add up to {sum(lengths)}, but dim {dim} of {list(tensor.shape)} has "
            f"{tensor.shape[dim]} elements"
        )
    return lengths


def lengths_of_part(tensor: Tensor, dim: int, lengths: Lengths, group: Group) -> Sequence[int]:
    """The lengths of all ranks' parts of `dim`, of which the tensor is this rank's; None asks them.

    Raises UsageError if they disagree with the tensor, or are not one per rank.
    """
    lengths = _ask_lengths(tensor, dim, group) if lengths is None else lengths
    _check_count(lengths, group)
    rank = place(group).rank
    if lengths[rank] != tensor.shape[dim]:
        raise UsageError(
            f"rank {rank} holds {tensor.shape[dim]} elements of dim {dim}, but lengths {list(lengths)} say "
            f"{lengths[rank]}: pass lengths=None to ask the ranks"
        )
    return lengths


def _check_count(lengths: Sequence[int], group: Group) -> None:
    world_size = place(group).world_size
    if len(lengths) != world_size:
        raise UsageError(f"lengths {list(lengths)} are {len(lengths)}, but the group has {world_size} ranks")


@dataclass(frozen=True)
class Split:
    """The split of a parameter: along `dim`, of `total` elements in the whole.

    With `parts` > 1 the whole is so many equal parts side by side (query, key and value in one matrix), and each rank
    holds its share of every part.
    """

    dim: int
    total: int
    world_size: int
    parts: int = 1
    lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", split_evenly(self.total // self.parts, self.world_size))

    def take(self, full: Tensor, rank: int) -> Tensor:
        """A copy of one rank's share of the whole."""
        parts = own_part(torch.unflatten(full, self.dim, (self.parts, -1)), self.dim + 1, self.lengths, rank)
        return parts.flatten(self.dim, self.dim + 1).clone()

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole of all ranks' shares in rank order."""
        parts = [torch.unflatten(share, self.dim, (self.parts, -1)) for share in shares]
        return torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)


class Sharded(nn.Module):
    """A layer some of whose parameters are split over a group; `splits` says which, and how.

    Its state_dict holds this rank's shares; `unisono.parallel.tensor.full_state_dict` gives the whole.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.place = place(group)
        self.splits: dict[str, Split] = {}

    def hold(self, name: str, full: Tensor | None, split: Split | None = None) -> None:
        """Makes this rank's share of a whole tensor (without `split`: a copy of it all) the parameter `name`."""
        if full is None:
            self.register_parameter(name, None)
            return
        share = full.detach().clone() if split is None else split.take(full.detach(), self.place.rank)
        self.register_parameter(name, nn.Parameter(share, requires_grad=full.requires_grad))
        if split is not None:
            self.splits[name] = split

    def adopt(self, whole: nn.Module) -> Self:
        """Takes this rank's shares of the parameters of the same names of a whole layer; returns itself."""
        for name in list(self._parameters):
            self.hold(name, getattr(whole, name), self.splits.get(name))
        return self
