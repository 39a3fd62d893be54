"""Which schedule sums over hosts, by what crosses and the meetings that it takes."""

from statistics import median

import pytest

from unisono.algorithms import build
from unisono.program.bind import LINE
from unisono.program.over_hosts import bind_over_hosts
from unisono.runtime.choice import Choice, by_hosts
from unisono.schedule import Link, Memory, Topology, as_hosts, joined
from unisono.simulation import simulate_tables
from unisono.transport.layout import Layout

KIB, MIB = 1 << 10, 1 << 20
TWO_BY_TWO = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("nbytes", "name"), [(4, "one_shot"), (256 * KIB, "one_shot"), (MIB, "prefix"), (16 * MIB, "prefix")]
)
def test_sums_of_two_hosts_of_two_ranks(nbytes: int, name: str) -> None:
    assert by_hosts("all_reduce", nbytes, 4, 0, False, TWO_BY_TWO).schedule.name == name


@pytest.mark.parametrize(("nbytes", "pieces"), [(MIB, 10), (4 * MIB, 20), (64 * MIB, 78)])
def test_partial_sums_go_in_the_more_pieces_the_longer_the_tensor_is(nbytes: int, pieces: int) -> None:
    choice = by_hosts("all_reduce", nbytes, 4, 0, False, TWO_BY_TWO)
    assert -(-nbytes // (choice.schedule.collective.num_chunks * choice.cap)) == pieces


def test_of_many_ranks_less_is_sent_to_all() -> None:
    hosts = tuple(tuple(range(4 * k, 4 * k + 4)) for k in range(4))
    names = [by_hosts("all_reduce", nbytes, 16, 0, False, hosts).schedule.name for nbytes in (4, 64 * KIB, 4 * MIB)]
    assert names == ["one_shot", "two_phase", "prefix"]


LINKS = {
    "10 ms, 100 Mbit/s": Link("far", 20.5e-3, 8.5e-8, announcement=10e-3),
    "0.1 ms, 1 Gbit/s": Link("far", 1.8e-3, 8.5e-9, announcement=0.9e-3),
}
"""Links of benchmarks/prediction, as a group measured them."""


def seconds(choice: Choice, nbytes: int, where: Topology) -> float:
    n, hosts = where.world_size, where.ranks_of_hosts
    made = [
        bind_over_hosts(
            choice.schedule, rank, choice.placement, [nbytes], hosts, stage=Layout(n).stage, cap=choice.cap
        )
        for rank in range(n)
    ]  # fmt: skip
    return float(simulate_tables(made, where).max())


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("cut", ["2x1", "2x2", "4x1", "4x2"])
def test_a_choice_costs_at_most_a_tenth_over_the_best_that_is_simulated(cut: str, link: str) -> None:
    n = int(cut[0]) * int(cut[2])
    hosts, over = as_hosts(cut, n), []
    memory = Memory(call=1e-3, meeting=2e-5, copy=3e-11, cores=2)
    where = joined(hosts, Link("none", 0.0, 0.0), ((LINKS[link],) * len(hosts),) * len(hosts), memory=memory)
    prefix = build("prefix", "all_reduce", n, hosts=hosts)
    for nbytes in (4, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB):
        caps = [-(-nbytes // (parts * prefix.collective.num_chunks * LINE)) * LINE for parts in (1, 4, 16, 64)]
        others = [Choice(prefix, "staged", cap=cap) for cap in caps]
        others += [
            Choice(build("one_shot", "all_reduce", n), "staged"),
            Choice(build("two_phase", "all_reduce", n), "mailbox"),
        ]
        chosen = seconds(by_hosts("all_reduce", nbytes, n, 0, True, hosts), nbytes, where)
        over.append(chosen / min(seconds(each, nbytes, where) for each in others) - 1)
    assert median(over) < 0.05
    assert max(over) < 0.1


def test_what_moves_only_goes_by_the_table_of_one_host() -> None:
    assert by_hosts("all_gather", MIB, 4, 0, False, TWO_BY_TWO).schedule.name == "direct"
    assert by_hosts("reduce", 4, 4, 1, False, TWO_BY_TWO).schedule.name == "star"
