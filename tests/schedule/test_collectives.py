import numpy as np
import pytest

from unisono.errors import UsageError
from unisono.schedule import COLLECTIVES, Collective
from unisono.schedule.collectives import COMPOSITIONS, REVERSES, ROOTED

T, F = True, False


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("all_reduce", [[T], [T]], [[T], [T]]),
        ("barrier", [[T], [T]], [[T], [T]]),
        ("broadcast", [[F], [T]], [[T], [T]]),
        ("reduce", [[T], [T]], [[F], [T]]),
        ("reduce_scatter", [[T, T], [T, T]], [[T, F], [F, T]]),
        ("all_gather", [[T, F], [F, T]], [[T, T], [T, T]]),
        ("gather", [[T, F], [F, T]], [[F, F], [T, T]]),
        ("scatter", [[F, F], [T, T]], [[T, F], [F, T]]),
        # chunks 0>0 0>1 1>0 1>1
        ("all_to_all", [[T, T, F, F], [F, F, T, T]], [[T, F, T, F], [F, T, F, T]]),
    ],
)
def test_conditions_for_two_ranks_and_root_one(name: str, before: list[list[bool]], after: list[list[bool]]) -> None:
    collective = Collective.of(name, 2, root=1 if name in ROOTED else 0)
    assert collective.held_before().tolist() == before
    assert collective.held_after().tolist() == after


@pytest.mark.parametrize("name", COLLECTIVES)
def test_conditions_agree_with_owner_and_source(name: str) -> None:
    collective = Collective.of(name, 3, pieces=2)
    assert collective.pieces == 2
    for chunk in range(collective.num_chunks):
        holders = np.flatnonzero(collective.held_before()[:, chunk])
        source = collective.source(chunk)
        assert holders.tolist() == ([0, 1, 2] if source is None else [source])
        assert (source is None) == collective.reduces
        owner = collective.owner(chunk)
        if owner is not None and name in ("reduce_scatter", "scatter", "all_to_all"):
            assert np.flatnonzero(collective.held_after()[:, chunk]).tolist() == [owner]


def test_bytes_of_a_chunk_count_as_in_nccl_tests() -> None:
    assert Collective.of("all_reduce", 4, pieces=8).chunk_nbytes(64) == 8
    assert Collective.of("all_gather", 4, pieces=2).chunk_nbytes(64) == 8
    # 64 bytes on each of 4 ranks: each sends 16 to each
    assert Collective.of("all_to_all", 4).chunk_nbytes(64) == 16
    assert Collective.of("barrier", 4).chunk_nbytes(64) == 0


@pytest.mark.parametrize(("first", "second"), COMPOSITIONS)
def test_compositions_follow_from_the_conditions(first: str, second: str) -> None:
    """a then b is c only if b finds what it needs where a leaves it, and c asks for what b gives."""
    whole = COMPOSITIONS[first, second]
    a, b, c = (Collective(name, 3, 6) for name in (first, second, whole))
    assert (a.held_before() == c.held_before()).all()
    assert (b.held_after() == c.held_after()).all()
    assert (a.held_after() >= b.held_before()).all()
    assert not b.reduces


@pytest.mark.parametrize(("name", "back"), REVERSES.items())
def test_reverses_swap_the_conditions(name: str, back: str) -> None:
    there, again = Collective.of(name, 3), Collective.of(back, 3)
    if name == "all_to_all":
        swap = np.arange(9).reshape(3, 3).T.ravel()  # chunk a>b becomes b>a
        assert (there.held_before()[:, swap] == again.held_after()).all()
    else:
        assert (there.held_before() == again.held_after()).all()
        assert (there.held_after() == again.held_before()).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("all_redcue", 2, 2), "unknown collective 'all_redcue': expected one of all_reduce"),
        (("all_reduce", 0, 1), "needs at least 1 rank, got world_size=0"),
        (("broadcast", 2, 1, 2), "broadcast over 2 ranks has no root 2"),
        (("all_reduce", 2, 1, 1), "all_reduce has no root, got root=1"),
        (("all_gather", 3, 4), "all_gather over 3 ranks needs a multiple of 3 chunks, got 4"),
        (("all_to_all", 3, 3), "needs a multiple of 9 chunks, got 3"),
        (("all_reduce", 3, 0), "got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Collective(*arguments)  # type: ignore[arg-type]
