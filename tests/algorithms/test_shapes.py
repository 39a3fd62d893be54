"""What sets each family apart, beyond being right: identities, in-place use, links that it uses."""

import numpy as np
import pytest

from algorithms.oracle import busiest_share, numbers_are_right
from unisono.algorithms import bruck, build, direct, grid, halving_doubling, ring, star, tree
from unisono.schedule import Schedule, preset
from unisono.verification import verify


def _links(schedule: Schedule) -> set[tuple[int, int]]:
    return {(t.src, t.dst) for step in schedule.explicit_steps() for t in step}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "name", ["ring", "bidirectional_ring", "double_ring", "direct", "bruck", "tree", "star", "grid"]
)
def test_all_reduce_is_reduce_scatter_followed_by_all_gather(name: str, n: int) -> None:
    both = build(name, "reduce_scatter", n).then(build(name, "all_gather", n))
    assert both.collective.name == "all_reduce"
    assert verify(both).ok
    assert numbers_are_right(both)
    known = {"ring": "ring", "bidirectional_ring": "bidirectional_ring", "double_ring": "double_ring"}
    known |= {"direct": "two_phase", "bruck": "bruck"}
    if name in known:
        assert both == build(known[name], "all_reduce", n)


def test_families_may_be_mixed_in_a_composition() -> None:
    mixed = halving_doubling.reduce_scatter(6).then(ring.all_gather(6))
    assert mixed.name == "halving_doubling+ring"
    assert verify(mixed).ok
    assert verify(tree.scatter(6, root=4).then(bruck.all_gather(6))).ok


@pytest.mark.parametrize("n", range(2, 10))
def test_pairwise_works_in_place_and_shift_does_not(n: int) -> None:
    assert verify(build("pairwise", "all_to_all", n, chunks=2), in_place=True).ok
    assert verify(build("direct", "all_to_all", n), in_place=True).ok
    assert verify(build("shift", "all_to_all", n)).in_place == (n == 2)


def test_bidirectional_ring_uses_both_ways_of_the_same_links() -> None:
    there = _links(ring.all_reduce(5))
    assert _links(ring.bidirectional_all_reduce(5)) == there | {(b, a) for a, b in there}


@pytest.mark.parametrize(("n", "stride"), [(5, 2), (7, 2), (8, 3), (9, 2)])
def test_double_ring_shares_no_link(n: int, stride: int) -> None:
    first = {(r, (r + 1) % n) for r in range(n)}
    second = {(r, (r + stride) % n) for r in range(n)}
    assert not first & second
    assert _links(ring.double_all_reduce(n)) == first | second
    assert _links(ring.double_all_gather(n, stride=-stride)) == first | {(b, a) for a, b in second}


def test_a_grid_may_be_given_its_rows() -> None:
    wide = grid.all_reduce(12, rows=2)
    assert wide.num_steps == 2 * 5 + 2 * 1
    assert verify(wide).ok
    assert verify(grid.reduce_scatter(12, rows=6)).ok


def test_the_server_of_a_star_may_be_any_rank() -> None:
    served = star.all_reduce(4, server=2)
    assert _links(served) == {(r, 2) for r in (0, 1, 3)} | {(2, r) for r in (0, 1, 3)}
    assert verify(served).ok
    assert verify(star.reduce_scatter(4, server=3)).ok


@pytest.mark.parametrize("inter", ["ring", "double_tree", "halving_doubling", "one_shot", "chain", "grid"])
@pytest.mark.parametrize("intra", ["ring", "tree", "direct", "bidirectional_ring", "double_tree", "chain"])
def test_hierarchical_mixes_any_two_levels(intra: str, inter: str) -> None:
    for n, hosts in ((6, 3), (8, 2), (5, 5), (4, 1)):
        schedule = build("hierarchical", "all_reduce", n, chunks=2, hosts=hosts, intra=intra, inter=inter)
        report = verify(schedule)
        assert report.ok, str(report)
        assert numbers_are_right(schedule)


def test_hierarchical_sends_little_between_hosts() -> None:
    hosts, local = 4, 8
    far = preset("cluster", hosts * local)
    schedule = build("hierarchical", "all_reduce", hosts * local, hosts=hosts, intra="direct", inter="ring")
    sent = np.zeros(hosts * local)
    for step in schedule.explicit_steps():
        np.add.at(sent, step.src, step.count * far.outside(step.src, step.dst))
    share = sent * schedule.collective.chunk_nbytes(1.0)
    assert share == pytest.approx(np.full(32, 2 * (hosts - 1) / hosts / local))
    assert busiest_share(schedule) == pytest.approx(2 * 31 / 32)


def test_hierarchical_all_gather_mixes_levels_too() -> None:
    schedule = build("hierarchical", "all_gather", 12, chunks=2, hosts=3, intra="bidirectional_ring", inter="bruck")
    assert verify(schedule).ok
    backwards = build(
        "hierarchical", "reduce_scatter", 12, chunks=2, hosts=3, intra="bruck", inter="recursive_doubling"
    )
    assert verify(backwards).ok


def test_one_shot_and_two_phase_add_in_rank_order() -> None:
    for schedule in (direct.one_shot_all_reduce(4), direct.two_phase_all_reduce(4)):
        first = next(schedule.explicit_steps())
        for rank in range(4):
            senders = first.src[first.dst == rank]
            assert (np.diff(senders) > 0).all()


def test_a_ring_of_24576_ranks_is_two_compact_steps() -> None:
    schedule = ring.all_reduce(24576)
    assert len(schedule.steps) == 2
    assert schedule.num_steps == 49150
    assert [len(step) for step in schedule.steps] == [24576, 24576]


def test_hierarchical_all_to_all_sends_one_large_message_per_pair_of_hosts() -> None:
    schedule = build("hierarchical", "all_to_all", 12, hosts=3, intra="pairwise", inter="shift")
    assert verify(schedule).ok
    assert numbers_are_right(schedule)
    far = {(s, d) for s, d in _links(schedule) if s // 4 != d // 4}
    assert far == {(s, d) for s in range(12) for d in range(12) if s // 4 != d // 4 and s % 4 == d % 4}


def test_hierarchical_scatter_may_be_a_chain_of_stars() -> None:
    schedule = build("hierarchical", "scatter", 12, root=6, hosts=3, intra="star", inter="chain")
    assert verify(schedule).ok
    assert schedule.num_steps == 2 + 1
