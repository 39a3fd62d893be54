"""Attention to one block of keys with its lse, on any device; torch's scaled_dot_product_attention returns none.

A block's result is the attention within it, and the logarithm of the sum of its exponentials (lse). Two results over
different keys merge exactly: each counts by its share exp(lse) of the sum (Milakov & Gimelshein 2018, online softmax;
Dao et al. 2022, FlashAttention, from whose section 3.1 the gradient comes too). Scores are kept for 512 queries at a
time and never stored for backward. Everything is computed in float32 at least.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Partial", "accumulation_dtype", "attend", "attend_backward"]

ROWS = 512


class Partial(NamedTuple):
    """Attention to the keys seen so far: `out` [..., queries, width] and `lse` [..., queries]."""

    out: Tensor
    lse: Tensor

    @classmethod
    def nothing(cls, query: Tensor) -> "Partial":
        """The result of having seen no keys."""
        out = torch.zeros_like(query, dtype=accumulation_dtype(query))
        return cls(out, out.new_full(out.shape[:-1], -torch.inf))

    def rows(self, rows: slice) -> "Partial":
        """A view of some of the queries' results."""
        return Partial(self.out[..., rows, :], self.lse[..., rows])

    def merge_(self, other: "Partial") -> None:
        """Take in, in place, the result for the same queries over other keys."""
        lse = torch.logaddexp(self.lse, other.lse)
        self.out.mul_((self.lse - lse).exp_().unsqueeze(-1)).addcmul_(other.out, (other.lse - lse).exp_().unsqueeze(-1))
        self.lse.copy_(lse)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which attention over it is computed."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """The queries in slices, each with the keys that any of them sees."""
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _scores(query: Tensor, key: Tensor, scale: float, first: int, causal: bool) -> Tensor:
    """Scaled products of queries, the first of which is number `first`, and keys; −∞ where a key comes later."""
    scores = (query @ key.mT).mul_(scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(first + 1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Partial:
    """Attention of the queries [..., queries, width] to one block of keys and values [..., keys, width].

    With `causal` a query sees the keys up to its own number. There must be at least one key.
    """
    dtype = accumulation_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    result = Partial(torch.empty_like(query), query.new_empty(query.shape[:-1]))
    for rows, seen in _blocks(query.shape[-2], key.shape[-2], causal):
        scores = _scores(query[..., rows, :], key[..., seen, :], scale, rows.start, causal)
        lse = scores.logsumexp(-1)
        result.lse[..., rows] = lse
        result.out[..., rows, :] = scores.sub_(lse.unsqueeze(-1)).exp_() @ value[..., seen, :]
    return result


def attend_backward(
    gradient: Tensor, delta: Tensor, lse: Tensor, inputs: tuple[Tensor, Tensor, Tensor], scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The contribution of one block to the gradients of its queries, keys and values (`inputs`).

    `gradient` [..., queries, width] is that of the merged result, `delta` [..., queries] the sum over the width of
    gradient · result, `lse` the merged one.
    """
    query, key, value = (tensor.to(gradient.dtype) for tensor in inputs)
    to_query, to_key, to_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for rows, seen in _blocks(query.shape[-2], key.shape[-2], causal):
        keys, values, outer = key[..., seen, :], value[..., seen, :], gradient[..., rows, :]
        scores = _scores(query[..., rows, :], keys, scale, rows.start, causal)
        weights = scores.sub_(lse[..., rows].unsqueeze(-1)).exp_()
        to_value[..., seen, :] += weights.mT @ outer
        to_scores = (outer @ values.mT).sub_(delta[..., rows].unsqueeze(-1)).mul_(weights).mul_(scale)
        to_query[..., rows, :] = to_scores @ keys
        to_key[..., seen, :] += to_scores.mT @ query[..., rows, :]
    return to_query, to_key, to_value
