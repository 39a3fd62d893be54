"""Ring attention equals plain attention, in values and gradients: rings, rings of rings, both layouts, any lengths."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel.refused import refused
from ranks import ranks
from unisono.parallel.sequence import (
    block_attention,
    ring_attention,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from unisono.parallel.sequence.layout import Layout

BACKENDS = ["unisono", "gloo"]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the factors of the loss."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]


def plain(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, scale: float | None) -> list[Tensor]:
    """Attention in one process, and the gradients of the three inputs."""
    *leaves, factors = inputs(shape, dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    y = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale)
    (y * factors).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def over_ranks(shape: tuple[int, ...], dtype: torch.dtype, group: Any, **options: Any) -> list[Tensor]:
    """The same over the ranks of a group, whole again."""
    layout = options.get("layout", "zigzag")
    *whole, factors = inputs(shape, dtype)
    leaves = [shard_sequence(tensor, -2, group, layout).requires_grad_() for tensor in whole]
    y = ring_attention(*leaves, group=group, **options)
    (y * shard_sequence(factors, -2, group, layout)).sum().backward()
    return [unshard_sequence(part, -2, group, layout) for part in (y.detach(), *(leaf.grad for leaf in leaves))]


def compare(rank: int, world_size: int, cases: list[tuple[tuple[int, ...], bool, str, float | None]]) -> None:
    for shape, causal, layout, scale in cases:
        results = over_ranks(shape, torch.float32, None, causal=causal, layout=layout, scale=scale)
        for result, expected in zip(results, plain(shape, torch.float32, causal, scale), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(
    st.integers(1, 4),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 19), st.integers(1, 5)),
    st.booleans(),
    st.sampled_from(["zigzag", "contiguous"]),
    st.sampled_from([None, 0.5]),
)
def test_equals_plain_attention(
    world_size: int, shape: tuple[int, ...], causal: bool, layout: str, scale: float | None
) -> None:
    ranks(world_size).run(compare, [(shape, causal, layout, scale)])


def test_equals_plain_attention_on_gloo() -> None:
    shapes = [(2, 2, 12, 4), (1, 1, 13, 3), (1, 2, 2, 3)]
    cases = [
        (s, causal, layout, None) for s in shapes for causal in (True, False) for layout in ("zigzag", "contiguous")
    ]
    ranks(3, backend="gloo").run(compare, cases)


def many_rows(rank: int, world_size: int) -> None:
    """More queries than are scored at once; and exact to the last digits in float64."""
    block_attention.ROWS, kept = 3, block_attention.ROWS
    try:
        compare(rank, world_size, [((1, 2, 17, 4), causal, "zigzag", None) for causal in (True, False)])
        results = over_ranks((1, 2, 17, 4), torch.float64, None, causal=True)
    finally:
        block_attention.ROWS = kept
    for result, expected in zip(results, plain((1, 2, 17, 4), torch.float64, True, None), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    low = over_ranks((1, 2, 17, 4), torch.bfloat16, None, causal=True)
    for result, expected in zip(low, plain((1, 2, 17, 4), torch.bfloat16, True, None), strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


def test_in_slices_of_queries_and_other_dtypes() -> None:
    ranks(2).run(many_rows)


def rings_of_rings(rank: int, world_size: int, inner: int, length: int) -> None:
    mesh = init_device_mesh("cpu", (world_size // inner, inner), mesh_dim_names=("outer", "inner"))
    pair = (mesh.get_group("inner"), mesh.get_group("outer"))
    shape = (2, 2, length, 3)
    for causal in (True, False):
        for layout in ("zigzag", "contiguous"):
            results = over_ranks(shape, torch.float32, pair, causal=causal, layout=layout)
            for result, expected in zip(results, plain(shape, torch.float32, causal, None), strict=True):
                torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "world_size", "inner"), [("unisono", 4, 2), ("unisono", 6, 3), ("gloo", 4, 2)])
def test_rings_of_rings(backend: str, world_size: int, inner: int) -> None:
    ranks(world_size, backend=backend).run(rings_of_rings, inner, 13)


def own_lengths(rank: int, world_size: int) -> None:
    """In rank order the parts may have any lengths, one of them none; known lengths need not be asked for."""
    lengths = [4, 0, 3]
    query, key, value, _ = inputs((2, 7, 3), torch.float32)
    parts = [torch.split(tensor, lengths, 1)[rank] for tensor in (query, key, value)]
    expected = torch.split(F.scaled_dot_product_attention(query, key, value, is_causal=True), lengths, 1)[rank]
    for known in (None, lengths):
        y = ring_attention(*parts, causal=True, layout="contiguous", lengths=known)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_any_lengths_in_rank_order() -> None:
    ranks(3).run(own_lengths)


def shard_and_gradient(rank: int, world_size: int, total: int, layout: str) -> tuple[list[int], list[int], Tensor]:
    whole = torch.arange(float(total)).requires_grad_()
    part = shard_sequence(whole, 0, layout=layout)
    assert torch.equal(unshard_sequence(part, 0, layout=layout), whole)
    (part * part.detach()).sum().backward()
    return sequence_positions(total, layout=layout).tolist(), part.int().tolist(), whole.grad


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_shards(layout: str) -> None:
    of_ranks = ranks(3).run(shard_and_gradient, 13, layout)
    places = [positions for positions, _, _ in of_ranks]
    if layout == "zigzag":  # six chunks of 3 2 2 2 2 2
        assert places == [[0, 1, 2, 11, 12], [3, 4, 9, 10], [5, 6, 7, 8]]
    else:
        assert places == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    for positions, part, gradient in of_ranks:
        assert part == positions
        assert gradient.tolist() == list(range(13))


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(0, 23), st.sampled_from(["zigzag", "contiguous"]))
def test_what_is_seen_is_the_causal_mask(world_size: int, total: int, kind: str) -> None:
    """Put together from what every rank sees of every other, the mask is the lower triangle."""
    layout = Layout(kind, total, world_size)
    held = torch.split(layout.order(), list(layout.lengths))
    mask = torch.zeros(total, total, dtype=torch.bool)
    for rank, queries in enumerate(held):
        for source, keys in enumerate(held):
            seen = layout.seen(rank, source)
            if seen is not None:
                pairs = queries[seen.queries][:, None], keys[seen.keys][None]
                mask[pairs] = pairs[1] <= pairs[0] if seen.causal else True
    assert torch.equal(mask, torch.ones_like(mask).tril())


def test_zigzag_gives_every_rank_the_same_work() -> None:
    layout = Layout("zigzag", 64, 4)
    held = torch.split(layout.order(), list(layout.lengths))
    work = []
    for rank, queries in enumerate(held):
        pairs = [(layout.seen(rank, source), keys) for source, keys in enumerate(held) if source != rank]
        work.append([len(queries[seen.queries]) * len(keys[seen.keys]) for seen, keys in pairs])
    assert work == [[16 * 8] * 3] * 4


def refusals(rank: int, world_size: int) -> list[str]:
    x, shorter = torch.zeros(2, 4, 3), torch.zeros(2, 3, 3)
    attempts = [
        lambda: ring_attention(x, x, shorter if rank else x),
        lambda: ring_attention(*[x.double() if rank else x] * 3),
        lambda: ring_attention(*[torch.zeros(2, 4, 3 + rank)] * 3),
        lambda: ring_attention(*[torch.zeros(2, 8 * rank, 3)] * 3, causal=True),
        lambda: ring_attention(x, x, x, layout="striped"),
        lambda: ring_attention(x, x, x, lengths=[4]),
        lambda: unshard_sequence(torch.zeros(3 * rank), 0),
    ]
    return refused(attempts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused_on_every_rank(backend: str) -> None:
    first, second = ranks(2, backend=backend).run(refusals)
    assert first[1:5] == second[1:5]
    assert "not on ranks [1]; on rank 0 they are [2, 4, 3] torch.float32, [2, 4, 3]" in first[0]
    assert (
        "not on ranks [1]; on rank 1 they are [2, 4, 3] torch.float32, [2, 4, 3] torch.float32, [2, 3, 3]" in second[0]
    )
    assert "or their dtypes differ" in first[1]
    assert "rank 0: [2, 4, 3], rank 1: [2, 4, 4]" in first[2]
    assert first[3] == "the ranks hold [0, 8] positions, but zigzag is [4, 4]: use shard_sequence"
    assert first[4] == "layout = 'striped': must be one of zigzag, contiguous"
    assert first[5].startswith("rank 0 of 2 has 4 positions, which is not what lengths = [4] say")
    assert first[6] == second[6] == "the ranks hold [0, 3] positions, but zigzag is [1, 2]: use shard_sequence"


def next_to_each_other(rank: int, world_size: int) -> None:
    """Two rings at once, each over its own half of the ranks."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = over_ranks((1, 1, 8, 2), torch.float32, halves[rank // 2], causal=True)
    for result, expected in zip(results, plain((1, 1, 8, 2), torch.float32, True, None), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_in_groups() -> None:
    ranks(4).run(next_to_each_other)
