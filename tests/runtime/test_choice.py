"""Which schedule sums over hosts, by what crosses and the meetings that it takes."""

import pytest

from unisono.runtime.choice import by_hosts

KIB, MIB = 1 << 10, 1 << 20
TWO_BY_TWO = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("nbytes", "name"), [(4, "one_shot"), (256 * KIB, "one_shot"), (MIB, "prefix"), (16 * MIB, "prefix")]
)
def test_sums_of_two_hosts_of_two_ranks(nbytes: int, name: str) -> None:
    assert by_hosts("all_reduce", nbytes, 4, 0, False, TWO_BY_TWO).schedule.name == name


@pytest.mark.parametrize(("nbytes", "pieces"), [(MIB, 8), (4 * MIB, 16), (64 * MIB, 64)])
def test_partial_sums_go_in_the_more_pieces_the_longer_the_tensor_is(nbytes: int, pieces: int) -> None:
    choice = by_hosts("all_reduce", nbytes, 4, 0, False, TWO_BY_TWO)
    assert -(-nbytes // (choice.schedule.collective.num_chunks * choice.cap)) == pieces


def test_of_many_ranks_less_is_sent_to_all() -> None:
    hosts = tuple(tuple(range(4 * k, 4 * k + 4)) for k in range(4))
    names = [by_hosts("all_reduce", nbytes, 16, 0, False, hosts).schedule.name for nbytes in (4, 64 * KIB, 4 * MIB)]
    assert names == ["one_shot", "two_phase", "prefix"]


def test_what_moves_only_goes_by_the_table_of_one_host() -> None:
    assert by_hosts("all_gather", MIB, 4, 0, False, TWO_BY_TWO).schedule.name == "direct"
    assert by_hosts("reduce", 4, 4, 1, False, TWO_BY_TWO).schedule.name == "star"
