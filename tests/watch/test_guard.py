"""The guard on headers alone: which ranks are odd, which pieces differ, what is remembered."""

import pytest
import torch

from unisono.runtime.call import Call, piece
from unisono.watch.guard import disagreement, table

NAMES = [3, 5, 9]


def headers(*calls: Call) -> bytes:
    return b"".join(call.header(len(calls), 96 + 16 * len(calls)) for call in calls)


def usual() -> Call:
    return Call("all_reduce", torch.float32, (2, 3), "SUM")


ODD = {
    "operation": Call("reduce", torch.float32, (2, 3), "SUM", root=0),
    "dtype": Call("all_reduce", torch.int32, (2, 3), "SUM"),
    "shape": Call("all_reduce", torch.float32, (3, 2), "SUM"),
    "rank of shape": Call("all_reduce", torch.float32, (6,), "SUM"),
    "reduce op": Call("all_reduce", torch.float32, (2, 3), "MAX"),
    "rest": Call("all_reduce", torch.float32, (2, 3), "SUM", extra_signature="factor 2"),
    "refused": Call("all_reduce", refused="no"),
}


def test_equal_calls_agree() -> None:
    assert disagreement(usual(), headers(usual(), usual(), usual()), 3, NAMES) is None


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_odd_rank_is_found(name: str, place: int) -> None:
    calls = [usual(), usual(), usual()]
    calls[place] = ODD[name]
    found = disagreement(calls[0], headers(*calls), 3, NAMES)
    assert found is not None
    assert found.odd == [place]


def test_without_a_majority_all_are_odd() -> None:
    found = disagreement(usual(), headers(usual(), ODD["dtype"]), 2, NAMES[:2])
    assert found is not None
    assert found.odd == [0, 1]
    three = disagreement(usual(), headers(usual(), ODD["dtype"], ODD["shape"]), 3, NAMES)
    assert three is not None
    assert three.odd == [0, 1, 2]


def exchange(sends: list[int], expects: list[int]) -> Call:
    return Call(
        "all_to_all",
        torch.float32,
        sends=tuple(piece((n,)) for n in sends),
        expects=tuple(piece((n,)) for n in expects),
    )


def test_pieces_that_fit_agree() -> None:
    calls = [exchange([9, 1, 2], [9, 3, 5]), exchange([3, 9, 4], [1, 9, 6]), exchange([5, 6, 9], [2, 4, 9])]
    together = headers(*calls)
    for call in calls:
        assert disagreement(call, together, 3, NAMES) is None
        assert together in call.accepted
        assert disagreement(call, together, 3, NAMES) is None


def test_pieces_that_differ_are_named() -> None:
    calls = [exchange([0, 1, 2], [0, 3, 5]), exchange([3, 0, 4], [1, 0, 6]), exchange([5, 7, 0], [2, 4, 0])]
    found = disagreement(calls[0], headers(*calls), 3, NAMES)
    assert found is not None
    assert found.odd == [1, 2]
    assert found.lines == ["rank 9 sends 7 elements to rank 5, which expects 6"]


def test_pieces_of_one_size_and_another_shape_are_told_apart() -> None:
    calls = [
        Call("gather", torch.float32, root=0, sends=(piece((2, 3)), 0), expects=(piece((2, 3)), piece((2, 3)))),
        Call("gather", torch.float32, root=0, sends=(piece((3, 2)), 0), expects=(0, 0)),
    ]
    found = disagreement(calls[0], headers(*calls), 2, NAMES[:2])
    assert found is not None
    assert found.lines == ["rank 5 sends 6 elements to rank 3, which expects 6 in another shape"]


def test_no_more_sets_of_headers_are_kept_than_needed() -> None:
    mine = exchange([0, 1], [0, 1])
    for k in range(200):
        other = Call("all_to_all", torch.float32, sends=(piece((1,)), k), expects=(piece((1,)), k))
        disagreement(mine, headers(mine, other), 2, NAMES[:2])
    assert 0 < len(mine.accepted) <= 16


def test_table() -> None:
    rows = [
        (3, "barrier()", "a.py:1 in f"),
        (5, "broadcast(float32 [2], root 3)", "b.py:22 in g"),
        (9, "barrier()", ""),
    ]
    assert table(rows, [5]) == (
        "     rank 3: barrier()                       a.py:1 in f\n"
        "  -> rank 5: broadcast(float32 [2], root 3)  b.py:22 in g\n"
        "     rank 9: barrier()"
    )
