"""Tree attention, which torch lacks: a new token attends to keys and values spread over the ranks, in two all_reduces.

Each rank attends to its own keys. The maximum of the ranks' lse makes the shares safe to exponentiate; the sum of the
weighted results and of the weights is the attention (Shyam et al. 2024, Tree Attention). What travels is a number per
head, then a vector per head: nothing grows with the sequence, and a tree takes 2 log₂ n steps where a ring takes n.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import UsageError
from unisono.parallel.sequence.block_attention import Partial, attend
from unisono.parallel.shards import Group, place

__all__ = ["ShardedKVCache", "tree_attention"]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of queries that every rank has to all ranks' keys: [..., queries, width], the same on every rank.

    `key` and `value` [..., own length, width] are this rank's part; their lengths may differ by rank and be zero. Every
    query sees every key. Computed in float32 at least; `scale` is 1/√width by
    default. To choose how the all_reduces run, call it under `unisono.algorithm("double_tree")`, say.

    For decoding: there is no gradient. Raises UsageError where one would be needed, or if shapes do not fit, and, on
    every rank, if all ranks together have no key.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise UsageError("tree_attention has no gradient: call it under torch.no_grad(), or train with ring_attention")
    if key.shape != value.shape or query.shape[:-2] != key.shape[:-2] or query.shape[-1] != key.shape[-1]:
        raise UsageError(
            f"query [..., queries, width] with key and value [..., length, width] do not fit as "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    own = attend(query, key, value, scale, causal=False) if key.shape[-2] else Partial.nothing(query)
    highest = own.lse.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    if torch.isneginf(highest).all() and highest.numel():
        raise UsageError("no rank has a key to attend to: pass one key or more on some rank")
    share = (own.lse - highest).exp_().unsqueeze(-1)
    sums = torch.cat((own.out * share, share), -1)
    dist.all_reduce(sums, group=group)
    return (sums[..., :-1] / sums[..., -1:]).to(query.dtype)


class ShardedKVCache:
    """Keys and values of a sequence that grows token by token, dealt out to the ranks in turn: token t to t mod n.

    `append` takes the new tokens' keys and values, [..., new, width], the same on every rank (of the prompt many, then
    one at a time); `attend` is `tree_attention` to all that has been appended.
    """

    def __init__(self, group: Group = None) -> None:
        self.group, self.place = group, place(group)
        self.length = 0
        self._filled = 0
        self._room: Tensor | None = None  # [2, ..., room, width]: keys, then values

    def append(self, key: Tensor, value: Tensor) -> None:
        """Keep this rank's share of the new tokens. Raises UsageError if the two differ in shape."""
        if key.shape != value.shape:
            raise UsageError(f"key and value must be of one shape, not {list(key.shape)} and {list(value.shape)}")
        rank, world_size = self.place
        mine = torch.stack((key, value))[..., (rank - self.length) % world_size :: world_size, :]
        self.length += key.shape[-2]
        filled = self._filled + mine.shape[-2]
        if self._room is None or filled > self._room.shape[-2]:
            room = mine.new_empty(*mine.shape[:-2], max(16, 2 * filled), mine.shape[-1])
            if self._room is not None:
                room[..., : self._filled, :] = self._room[..., : self._filled, :]
            self._room = room
        self._room[..., self._filled : filled, :] = mine
        self._filled = filled

    def attend(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention of the query, the same on every rank, to every token so far. Raises UsageError if there is none."""
        if self._room is None or self.length == 0:
            raise UsageError("the cache is empty: append the prompt's keys and values first")
        key, value = self._room[..., : self._filled, :]
        return tree_attention(query, key, value, group=self.group, scale=scale)
