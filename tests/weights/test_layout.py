"""Layouts as values: cut, saved, read, merged; what cannot be read or does not agree is named."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import MismatchError, UsageError
from unisono.weights import Layout, Shard, layout
from unisono.weights.layout import Box, TensorLayout, merge
from weights.moving import layouts_of, whole_layout, wholes


def of(**tensors: torch.Tensor) -> Layout:
    return whole_layout(tensors)


def test_a_layout_says_what_is_where() -> None:
    cut = of(up=torch.empty(151, 4), bias=torch.empty(3), n=torch.empty((), dtype=torch.int64)).split(2, {"u*": 0})
    assert (cut.names, cut.world_size, cut.nbytes) == (("up", "bias", "n"), 2, 151 * 16 + 12 + 8)
    assert (cut["up"].shape, cut["up"].dtype) == ((151, 4), torch.float32)
    assert cut["up"].parts == ((Box((0, 0), (76, 4), (0, 0)),), (Box((76, 0), (75, 4), (0, 0)),))
    assert cut["bias"].parts == ((Box((0,), (3,), (0,)),),) * 2
    assert cut["n"].parts == ((Box((), (), ()),),) * 2
    assert [cut.nbytes_of(rank) for rank in range(2)] == [76 * 16 + 20, 75 * 16 + 20]


def test_blocks_side_by_side_are_cut_each() -> None:
    cut = of(qkv=torch.empty(16, 2)).split(2, {"qkv": Shard(0, (8, 4, 4))})
    assert cut["qkv"].parts[1] == (
        Box((4, 0), (4, 2), (0, 0)),
        Box((10, 0), (2, 2), (4, 0)),
        Box((14, 0), (2, 2), (6, 0)),
    )


def test_more_ranks_than_rows_leaves_some_without() -> None:
    assert [len(part) for part in of(w=torch.empty(2, 3)).split(4, {"w": 0})["w"].parts] == [1, 1, 0, 0]


def test_the_first_pattern_counts_and_a_tensor_without_the_dim_stays_whole() -> None:
    cut = of(a=torch.empty(4, 4), b=torch.empty(4)).split(2, {"a": 1, "*": -2})
    assert cut["a"].parts[0] == (Box((0, 0), (4, 2), (0, 0)),)
    assert cut["b"].parts[0] == cut["b"].parts[1]


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ({"x": 0}, 'shard: "x" matches no tensor; there are w'),
        ({"w": Shard(0, 3)}, "w: dim 0 has 8 elements, not 3 equal blocks"),
        ({"w": Shard(0, (4, 3))}, "w: dim 0 has 8 elements, but blocks of 4 + 3: correct parts="),
    ],
)
def test_a_cut_that_does_not_suit_is_refused(shard: dict[str, int | Shard], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        of(w=torch.empty(8, 8)).split(2, shard)
    assert words in str(caught.value)


@pytest.mark.parametrize("parts", [0, -1, (), (2, -1)])
def test_parts_of_a_shard_are_checked(parts: int | tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="parts of a Shard must be"):
        Shard(0, parts)


@settings(max_examples=60)
@given(st.data())
def test_the_text_form_gives_it_back(data: st.DataObject) -> None:
    made = data.draw(layouts_of(data.draw(wholes())))
    assert Layout.from_text(made.to_text()) == made


def test_files(tmp_path: Path) -> None:
    tied = layout({"a": (t := torch.empty(3)), "b": t})
    tied.save(tmp_path / "layout.json")
    assert Layout.load(tmp_path / "layout.json") == tied
    assert tied.ties == {"b": "a"}
    with pytest.raises(UsageError, match=r"cannot read .*none\.json: No such file"):
        Layout.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory"):
        tied.save(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"layout": 2}',
        '{"layout": 1, "world_size": 0, "ties": {}, "tensors": {}}',
        '{"layout": 1, "world_size": 1, "ties": {"a": "b"}, "tensors": {}}',
        '{"layout": 1, "world_size": 1, "ties": {}, "tensors": {"a": {"shape": [-1], "dtype": "float32"}}}',
        '{"layout": 1, "world_size": 1, "ties": {}, "tensors": {"a": {"shape": [1], "dtype": "Tensor"}}}',
        '{"layout": 1, "world_size": 2, "ties": {}, "tensors": {"a": {"shape": [1], "dtype": "float32", "parts": []}}}',
        '{"layout": 1, "world_size": 1, "ties": {}, "tensors": {"a": {"shape": [1], "dtype": "float32", '
        '"parts": [[[[1], [1], [0]]]]}}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_layout_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UsageError, match=r"bad\.json: "):
        Layout.load(tmp_path / "bad.json")


def part(shape: tuple[int, ...], cut: Shard | None = None, dtype: torch.dtype = torch.float32) -> Layout:
    whole = TensorLayout(shape, dtype, ((Box((0,) * len(shape), shape, (0,) * len(shape)),),), cut)
    return Layout(1, {"w": whole})


def test_ranks_that_hold_the_whole_are_replicas() -> None:
    assert merge([part((4, 2))] * 3) == of(w=torch.empty(4, 2)).split(3)


@pytest.mark.parametrize(("own", "total"), [((3, 2), 5), ((1, 4), 5), ((0, 5, 2), 7)])
def test_declared_parts_add_up_by_the_ranks_own_sizes(own: tuple[int, ...], total: int) -> None:
    merged = merge([part((length, 4), Shard(0)) for length in own])
    assert merged["w"].shape == (total, 4)
    assert [sum(box.shape[0] for box in held) for held in merged["w"].parts] == list(own)


def test_declared_blocks_add_up() -> None:
    merged = merge([part((4, 6), Shard(1, 3)), part((4, 3), Shard(1, 3))])
    assert merged == of(w=torch.empty(4, 9)).split(2, {"w": Shard(1, 3)})
    sized = merge([part((6,), Shard(0, (8, 4))), part((6,), Shard(0, (8, 4)))])
    assert sized == of(w=torch.empty(12)).split(2, {"w": Shard(0, (8, 4))})


def test_a_name_may_be_on_some_ranks_only() -> None:
    merged = merge([part((4,)), Layout(1, {}), part((4,))])
    assert [len(held) for held in merged["w"].parts] == [1, 0, 1]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([part((4, 2)), part((3, 2))], "w: rank 0 has float32 [4, 2], rank 1 has float32 [3, 2]; if they are parts"),
        ([part((4,)), part((4,), dtype=torch.int8)], "rank 1 has int8 [4]"),
        ([part((4, 2), Shard(0)), part((4, 3), Shard(0))], "rank 1 has float32 [4, 3]"),
        ([part((4,), Shard(0)), part((4,))], "rank 0 has float32 [4]"),
        ([part((4,), Shard(0, 3)), part((3,), Shard(0, 3))], "w: ranks hold [4, 3] elements of dim 0, not 3 blocks"),
        ([part((7,), Shard(0, (8, 4))), part((5,), Shard(0, (8, 4)))], "blocks (8, 4) give [6, 6]"),
        ([part((4,)).split(3), part((4,))], "rank 0 has a layout of 3 ranks, but its side has 2"),
    ],
)
def test_ranks_at_odds_are_named(ranks: list[Layout], words: str) -> None:
    with pytest.raises(MismatchError) as caught:
        merge(ranks)
    assert words in str(caught.value)


def test_names_are_tied_if_they_are_on_every_rank() -> None:
    tied, loose = layout({"a": (t := torch.empty(3)), "b": t}), layout({"a": torch.empty(3), "b": torch.empty(3)})
    assert merge([tied, tied]).ties == {"b": "a"}
    assert merge([tied, loose]).ties == {}


def test_a_layout_needs_parts_of_every_rank() -> None:
    with pytest.raises(UsageError, match="w has parts of 1 ranks in a layout of 2"):
        Layout(2, part((4,)).tensors)
    with pytest.raises(UsageError, match="a layout needs at least 1 rank"):
        Layout(0, {})
