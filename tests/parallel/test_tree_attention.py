"""Tree attention against a sharded cache equals plain attention against all of it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from parallel.refused import refused
from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.sequence import ShardedKVCache, tree_attention


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(rank: int, world_size: int, queries: int, lengths: list[int], algorithm: str | None) -> None:
    query, key, value = (numbers(2, 3, n, 4, seed=n) for n in (queries, sum(lengths), sum(lengths)))
    parts = [torch.split(tensor, lengths, 2)[rank] for tensor in (key, value)]
    with unisono.algorithm(algorithm):  # on Gloo it chooses nothing
        y = tree_attention(query, *parts)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(query, key, value), rtol=1e-5, atol=1e-5)
    y = tree_attention(query.bfloat16(), *(part.bfloat16() for part in parts), scale=2.0)
    assert y.dtype == torch.bfloat16
    expected = F.scaled_dot_product_attention(query, key, value, scale=2.0)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    st.integers(1, 3),
    st.sampled_from(["double_tree", None]),
)
def test_equals_plain_attention(lengths: list[int], queries: int, algorithm: str | None) -> None:
    ranks(len(lengths)).run(compare, queries, lengths, algorithm)


def test_on_gloo() -> None:
    ranks(3, backend="gloo").run(compare, 1, [5, 0, 2], "double_tree")


def scores_far_apart(rank: int, world_size: int) -> float:
    """Rank 0's scores are larger by 2000 than rank 1's: a sum of plain exponentials would overflow."""
    key = torch.full((1, 1), 1000.0 if rank == 0 else -1000.0)
    return tree_attention(torch.ones(1, 1), key, torch.full((1, 1), float(rank + 1)), scale=1.0).item()


def test_is_stable() -> None:
    assert ranks(2).run(scores_far_apart) == [1.0] * 2


def decode(rank: int, world_size: int) -> tuple[int, int]:
    """A prompt of five tokens, then twenty-five more one by one: after each, attention to all so far."""
    key, value, query = (numbers(2, 30, 4, seed=seed) for seed in range(3))
    cache = ShardedKVCache()
    with pytest.raises(UsageError, match="the cache is empty"):
        cache.attend(query[:, :1])
    cache.append(key[:, :5], value[:, :5])
    for token in range(5, 30):
        cache.append(key[:, token : token + 1], value[:, token : token + 1])
        seen = key[:, : token + 1], value[:, : token + 1]
        expected = F.scaled_dot_product_attention(query[:, token : token + 1], *seen)
        torch.testing.assert_close(cache.attend(query[:, token : token + 1]), expected, rtol=1e-5, atol=1e-5)
    return cache.length, cache._filled


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_cache(backend: str) -> None:
    assert ranks(4, backend=backend).run(decode) == [(30, 8), (30, 8), (30, 7), (30, 7)]


def refusals(rank: int, world_size: int) -> list[str]:
    query, key = torch.ones(2, 1, 3), torch.ones(2, 4, 3)
    attempts = [
        lambda: tree_attention(query.requires_grad_(), key, key),
        lambda: tree_attention(query.detach(), key, key[:, :3]),
        lambda: ShardedKVCache().append(key, key[:, :3]),
        lambda: tree_attention(query.detach(), key[:, :0], key[:, :0]),
    ]
    messages = refused(attempts)
    with torch.no_grad():
        assert tree_attention(query, key, key).shape == query.shape
    return messages


def test_what_is_refused() -> None:
    first, second = ranks(2).run(refusals)
    assert first == second
    assert first[0].startswith("tree_attention has no gradient: call it under torch.no_grad()")
    assert "do not fit as [2, 1, 3], [2, 4, 3], [2, 3, 3]" in first[1]
    assert first[2] == "key and value must be of one shape, not [2, 4, 3] and [2, 3, 3]"
    assert first[3].startswith("no rank has a key to attend to")
