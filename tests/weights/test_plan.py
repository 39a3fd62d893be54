"""Plans: any layout to any other against slicing the whole in one process, and what a plan promises."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import MismatchError, UsageError
from unisono.schedule import PRESETS, preset
from unisono.weights import Layout, Plan, Shard, ignore, plan
from weights.moving import assert_same, held, layouts_of, moved, numbers, whole_layout, wholes

FORWARDS = ("auto", "direct", "chain", "tree")


def whole_of(**shapes: tuple[int, ...]) -> Layout:
    return whole_layout({name: torch.empty(shape) for name, shape in shapes.items()})


@settings(max_examples=100)
@given(st.data())
def test_any_layout_to_any_other(data: st.DataObject) -> None:
    check_any_layout_to_any_other(data)


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=5000, derandomize=False)
@given(st.data())
def test_any_layout_to_any_other_for_long(data: st.DataObject) -> None:
    check_any_layout_to_any_other(data)


def check_any_layout_to_any_other(data: st.DataObject) -> None:
    whole = data.draw(wholes())
    sender = data.draw(layouts_of(whole))
    receivers = data.draw(st.lists(layouts_of(whole), min_size=1, max_size=3))
    bucket = data.draw(st.sampled_from([1, 16, 100, 1 << 20]))
    made = plan(sender, receivers, bucket=bucket, forward=data.draw(st.sampled_from(FORWARDS)))
    report = made.verify()
    assert report, str(report)
    assert not report.notes  # nothing arrives twice, nothing is of no use
    gaps = data.draw(st.booleans())
    taken = moved(made, [held(sender, rank, whole, gaps) for rank in range(sender.world_size)], gaps)
    places = [(layout, rank) for layout in receivers for rank in range(layout.world_size)]
    for at, (layout, rank) in enumerate(places):
        assert_same(layout, rank, taken[at], whole)
        assert made.received[sender.world_size + at] == layout.nbytes_of(rank)
    assert made.received[: sender.world_size] == [0] * sender.world_size
    largest = max((t.dtype.itemsize for t in whole.values()), default=1)
    assert all(chunk.nbytes <= max(bucket, largest) for chunk in made.chunks)
    assert all(chunk.source < sender.world_size <= min(chunk.targets) for chunk in made.chunks)


def test_a_plan_is_a_pure_function() -> None:
    base = whole_of(a=(151, 3), b=(4, 4))
    first, second = (plan(base.split(2, {"*": 0}), [base.split(2, {"*": 1})] * 2, bucket=64) for _ in range(2))
    assert (first.chunks, first.schedule) == (second.chunks, second.schedule)
    assert first.schedule.from_text(str(first.schedule)) == first.schedule


def test_rows_of_151_over_2_become_columns() -> None:
    base = whole_of(w=(151, 64))
    made = plan(base.split(2, {"w": 0}), base.split(2, {"w": 1}))
    assert made.sent == [76 * 64 * 4, 75 * 64 * 4, 0, 0]
    assert made.received == [0, 0, 151 * 32 * 4, 151 * 32 * 4]


@pytest.mark.parametrize("senders", [2, 3, 4])
@pytest.mark.parametrize("bucket", [4096, 1 << 16, 1 << 20])
@pytest.mark.parametrize("forward", ["direct", "chain", "tree"])
def test_equal_copies_are_shared_out(senders: int, bucket: int, forward: str) -> None:
    base = whole_of(**{f"small{i}": (10 + i, 10) for i in range(100)}, big=(1000, 700), odd=(3, 77777))
    made = plan(base.split(senders), [base, base.split(2, {"big": 0})], bucket=bucket, forward=forward)
    sent = made.sent[:senders]
    assert max(sent) - min(sent) <= bucket
    assert sum(made.sent) == sum(made.received) == made.nbytes


def test_few_bytes_are_not_scattered_over_senders() -> None:
    base = whole_of(**{f"b{i}": (100,) for i in range(10)})
    assert len(plan(base.split(4), base).chunks) == 1


def test_chunks_number_by_bucket() -> None:
    base = whole_of(**{f"layers.{i}": (10, 10) for i in range(3000)})
    assert len(plan(base, base, bucket=100_000).chunks) == 12


def test_dtypes_lie_where_they_may() -> None:
    whole = {f"t{i}": torch.empty(3, dtype=d) for i, d in enumerate((torch.int8, torch.float64, torch.bfloat16))}
    (chunk,) = plan(whole_layout(whole), whole_layout(whole)).chunks
    assert [piece.name for piece in chunk.pieces] == ["t1", "t2", "t0"]


def test_a_chunk_for_many_leaves_the_senders_once_if_it_pays() -> None:
    base = whole_of(**{f"w{i}": (256, 1024) for i in range(32)})
    made = plan(base, [base] * 7, bucket=1 << 20)
    assert made.forward != "direct"
    assert made.sent[0] == base.nbytes
    direct = plan(base, [base] * 7, bucket=1 << 20, forward="direct")
    assert direct.sent[0] == 7 * base.nbytes
    assert made.simulate().time < direct.simulate().time
    assert "by ranks" in made.explain()


def test_a_tree_hands_on_in_the_logarithm_of_steps() -> None:
    base = whole_of(w=(8,))
    assert plan(base, [base] * 7, forward="tree").schedule.num_steps == 3
    assert plan(base, [base] * 7, forward="chain").schedule.num_steps == 7
    assert plan(base, [base] * 7, forward="direct").schedule.num_steps == 1


def test_a_rank_sends_one_chunk_and_receives_one_in_a_step() -> None:
    base = whole_of(a=(64, 64), b=(100, 10))
    made = plan(base.split(4, {"*": 0}), [base.split(2, {"*": 1}), base], bucket=512)
    for step in made.schedule.steps:
        received = [transfer.dst for transfer in step]
        sent = {(transfer.src, transfer.chunk) for transfer in step}
        assert len(set(received)) == len(received)
        assert len({src for src, _ in sent}) == len(sent)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("forward", ["direct", "chain", "tree"])
def test_no_simulation_beats_the_bound(name: str, forward: str) -> None:
    base = whole_of(a=(640, 640), b=(1000, 10))
    made = plan(base.split(4, {"a": 0}), [base.split(2, {"a": 1}), base, base], bucket=1 << 16, forward=forward)
    where = preset(name, made.world_size)
    assert 0 < made.bound(where) <= made.simulate(where).time


@pytest.mark.parametrize(("senders", "to"), [(2, 2), (4, 2), (2, 4), (16, 8)])
def test_rows_become_columns_near_the_bound(senders: int, to: int) -> None:
    base = whole_of(**{f"w{i}": (640, 640) for i in range(16)})
    made = plan(base.split(senders, {"*": 0}), base.split(to, {"*": 1}), bucket=1 << 18)
    assert made.simulate().time <= 1.3 * made.bound()


def test_explain_says_who_sends_what_and_draws() -> None:
    base = whole_of(a=(64, 64), b=(10,))
    text = plan(base.split(2, {"a": 0}), base.split(2, {"a": 1})).explain()
    assert text.startswith("2 tensors, 16.1 KiB from 2 ranks to 2 ranks of 1 replica\n")
    assert re.search(r"^2 +replica 0 +0 B +8.04 KiB$", text, re.MULTILINE)
    assert "% of the bound" in text
    assert "weights redistribution · 4 ranks" in text


def test_nothing_to_move() -> None:
    base = whole_of(a=(0, 5))
    made = plan(base, [base, base])
    assert (made.chunks, made.nbytes, made.bound(), made.simulate().time) == ([], 0, 0.0, 0.0)
    assert made.verify()
    assert made.explain()


def test_differing_layouts_of_replicas_share_what_they_have_in_common() -> None:
    base = whole_of(w=(8, 8))
    made = plan(base, [base, base.split(2, {"w": 0})], forward="direct")
    assert sorted(chunk.targets for chunk in made.chunks) == [(1, 2), (1, 3)]


def test_a_piece_that_is_lost_or_repeated_is_found() -> None:
    base = whole_of(w=(8, 8))
    made = plan(base, base.split(2, {"w": 0}))
    (first, second) = made.chunks
    lost = second._replace(pieces=(second.pieces[0]._replace(shape=(3, 8)),), nbytes=96)
    assert [f.kind for f in Plan(base, made.receivers, made.fits, [first, lost], "direct").verify().findings] == [
        "lost"
    ]
    again = Plan(base, made.receivers, made.fits, [first, second, second], "direct")
    assert "32 elements come to rank 2 twice" in str(again.verify())
    astray = Plan(base, made.receivers, made.fits, [first, second, first._replace(targets=(2,))], "direct")
    assert "32 that it has no place for" in str(astray.verify())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"bucket": 0}, "bucket=0: expected an int of at least 1"),
        ({"forward": "ring"}, "unknown forward 'ring': expected auto, direct, chain, tree"),
        ({"rules": [ignore("x")]}, 'ignore("x"): "x" matches no tensor; there are w'),
    ],
)
def test_what_is_refused(asked: dict[str, object], words: str) -> None:
    base = whole_of(w=(8, 8))
    with pytest.raises(UsageError) as caught:
        plan(base, base, **asked)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_no_receiver_is_refused() -> None:
    with pytest.raises(UsageError, match="needs at least one receiver"):
        plan(whole_of(w=(2,)), [])


def test_the_differences_of_all_receivers_come_at_once() -> None:
    base = whole_of(w=(8, 8))
    with pytest.raises(MismatchError, match=r"(?s)fit receiver 0: .*float32 \[8, 8\].*fit receiver 1: ") as caught:
        plan(base, [whole_of(w=(4, 4)), whole_of(v=(8, 8)), base])
    assert 'rename("w", "v")' not in str(caught.value).partition("receiver 1")[0]


def test_parts_that_no_sender_holds_are_found() -> None:
    base = whole_of(w=(8, 8)).split(2, {"w": 0})
    half = Layout(1, {"w": base["w"].__class__((8, 8), torch.float32, base["w"].parts[:1])})
    with pytest.raises(MismatchError, match="w: 32 of 64 elements are held by no rank of the sender"):
        plan(half, whole_of(w=(8, 8)))


def test_blocks_side_by_side() -> None:
    whole = {"qkv": numbers((12, 5), torch.float32)}
    base = whole_layout(whole)
    sender, receiver = base.split(2, {"qkv": Shard(0, (6, 3, 3))}), base.split(3, {"qkv": Shard(0, 2)})
    taken = moved(plan(sender, receiver), [held(sender, rank, whole) for rank in range(2)])
    assert torch.equal(taken[0]["qkv"], torch.cat([whole["qkv"][0:2], whole["qkv"][6:8]]))
    assert torch.equal(taken[2]["qkv"], torch.cat([whole["qkv"][4:6], whole["qkv"][10:12]]))
