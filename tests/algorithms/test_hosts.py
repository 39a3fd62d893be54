"""Schedules over hosts: any cut is proved, moves numbers right, keeps the ranks' order, and sends little between."""

from collections import Counter

import numpy as np
import pytest
import torch

from algorithms.oracle import numbers_are_right
from unisono.algorithms import AlgorithmInfo, build, list_algorithms
from unisono.errors import UsageError
from unisono.runtime.run import run
from unisono.schedule import Hosts, Schedule, as_hosts, runs_of, show_hosts
from unisono.verification import sum_order, verify

CUTS = {4: ("2x2", "3+1", "0,2/1,3", "1,2/0,3", "4x1", "1x4"), 7: ("3+2+2", "0,1,6/2,4,5/3")}
OVER_HOSTS = [a for a in list_algorithms() if a.name in ("leaders", "columns")]
named = pytest.mark.parametrize("algorithm", OVER_HOSTS, ids=lambda a: f"{a.name}-{a.collective}")
cuts = pytest.mark.parametrize(("n", "cut"), [(n, cut) for n, found in CUTS.items() for cut in found])


def between(schedule: Schedule, cut: str) -> Counter[tuple[int, int]]:
    """Chunks that go from one host to another, by pair of hosts."""
    hosts = as_hosts(cut, schedule.world_size)
    of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    found: Counter[tuple[int, int]] = Counter()
    for step in schedule.explicit_steps():
        for t in step:
            if of[t.src] != of[t.dst]:
                found[of[t.src], of[t.dst]] += t.count
    return found


def order_by_runs(hosts: Hosts) -> str:
    """The order in which the schedules over hosts that keep the ranks' order add: by runs, then from run to run."""
    runs = ["+".join(map(str, run)) for run in runs_of(hosts)]
    return "+".join([runs[0], *(f"({run})" if "+" in run else run for run in runs[1:])])


@named
@cuts
def test_any_cut_is_proved_and_adds_by_runs(algorithm: AlgorithmInfo, n: int, cut: str) -> None:
    for root in {0, n // 2, n - 1} if algorithm.rooted else {0}:
        for chunks in (1, 3):
            schedule = build(algorithm.name, algorithm.collective, n, root, chunks, hosts=cut)
            report = verify(schedule)
            assert report.ok, str(report)
            assert not report.notes, report.notes
            order = sum_order(schedule)
            if algorithm.collective in ("all_reduce", "reduce", "reduce_scatter"):
                assert order.orders == (order_by_runs(as_hosts(cut, n)),)
                assert order.ascending
            if chunks == 1 and algorithm.collective != "barrier":
                assert numbers_are_right(schedule)


@pytest.mark.parametrize("inter", ["recursive_doubling", "tree", "ring", "halving_doubling", "two_phase"])
def test_any_all_reduce_serves_between_leaders_and_in_columns(inter: str) -> None:
    for n, cut in ((6, "3x2"), (7, "3+2+2"), (5, "5x1")):
        for name in ("leaders", "columns"):
            schedule = build(name, "all_reduce", n, chunks=2, hosts=cut, inter=inter)
            assert verify(schedule).ok
            assert numbers_are_right(schedule)


def test_an_order_that_depends_on_the_place_is_seen() -> None:
    ring = sum_order(build("leaders", "all_reduce", 4, hosts="4x1", inter="ring"))
    assert not ring.uniform
    assert str(ring).startswith("sums: in 4 orders, by where an element lies: 0+(1+2+3), 0+(2+3)+1")
    halves = sum_order(build("leaders", "all_reduce", 4, hosts="4x1", inter="halving_doubling"))
    assert str(halves) == "sums: 0+2+(1+3) for every element, not in rank order"
    assert str(sum_order(build("leaders", "all_reduce", 4, hosts="2x2"))) == "sums: 0+1+(2+3) for every element"
    assert str(sum_order(build("leaders", "broadcast", 4))) == "nothing is summed"


@pytest.mark.parametrize("name", ["leaders", "columns"])
def test_sums_by_runs_have_the_bits_of_partial_sums_added_in_order(name: str) -> None:
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(5)]
    for chunks in (1, 4):
        schedule = build(name, "all_reduce", 5, chunks=chunks, hosts="0,1,4/2,3")
        whole, part = run(schedule, values), run(schedule, [v[3:700].clone() for v in values])
        wanted = ((values[0] + values[1]) + (values[2] + values[3])) + values[4]
        assert all(torch.equal(each, wanted) for each in whole)
        assert all(torch.equal(each, wanted[3:700]) for each in part)


def test_in_rank_order_the_bits_are_those_of_one_host_whatever_the_cut() -> None:
    values = [torch.randn(300, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(4)]
    alone = run(build("two_phase", "all_reduce", 4), values)[0]
    for cut in CUTS[4]:
        for name in ("leaders", "columns"):
            every = run(build(name, "all_reduce", 4, hosts=cut), values, deterministic=True)
            assert all(torch.equal(each, alone) for each in every)


def test_hosts_exchange_as_few_bytes_and_messages_as_can_be() -> None:
    for cut in ("4x2", "3+2+2+1"):
        columns = build("columns", "all_reduce", 8, hosts=cut)
        sent = Counter()
        for (src, _), count in between(columns, cut).items():
            sent[src] += count
        assert {count / columns.collective.num_chunks for count in sent.values()} == {2 * 3 / 4}
        leaders = build("leaders", "all_to_all", 8, hosts=cut)
        far = {h: len(ranks) for h, ranks in enumerate(as_hosts(cut, 8))}
        assert between(leaders, cut) == {(a, b): far[a] * far[b] for a in far for b in far if a != b}
        gathered = between(build("columns", "all_gather", 8, hosts=cut), cut)
        assert gathered == {(a, b): far[a] for a in far for b in far if a != b}
    assert build("leaders", "all_reduce", 8, hosts="4x2").num_steps == 3


def test_pieces_are_under_way_between_hosts_while_the_next_are_summed_inside() -> None:
    schedule = build("columns", "all_reduce", 4, chunks=3, hosts="2x2")
    assert [len(step) for step in schedule.steps] == [4, 8, 12, 8, 4]
    second = schedule.steps[1]
    inside = second.src // 2 == second.dst // 2
    assert set(second.chunk[inside].tolist()) == {2, 3}
    assert set(second.chunk[~inside].tolist()) == {0, 1}


def test_hosts_are_read_and_shown() -> None:
    assert as_hosts(2, 4) == as_hosts("2", 4) == as_hosts("2x2", 4) == as_hosts([[3, 2], [0, 1]], 4) == ((0, 1), (2, 3))
    assert as_hosts("3+1", 4) == ((0, 1, 2), (3,))
    assert as_hosts("3,4/0-2,5", 6) == ((0, 1, 2, 5), (3, 4))
    assert runs_of(as_hosts("3,4/0-2,5", 6)) == ((0, 1, 2), (3, 4), (5,))
    for shown in ("2x2", "3+1", "0,3/1-2", "4x1"):
        assert show_hosts(as_hosts(shown, 4)) == shown
    assert build("leaders", "all_reduce", 4, hosts=[[0, 3], [1, 2]]) == build(
        "leaders", "all_reduce", 4, hosts="0,3/1-2"
    )


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (3, "4 ranks do not divide among 3 hosts"),
        (0, "4 ranks do not divide among 0 hosts"),
        ("2+1", "hosts 2\\+1 have 3 ranks, not 4"),
        ("9999999x9", "not 4"),
        ("0-2/2,3", "every rank from 0 to 3 once, got 0-2/2-3"),
        ("0-1/2-4", "there is no rank 4 among 4"),
        ("a/b", "hosts are 'a/b', expected a number, or a form such as"),
        ("0-1//2-3", "ranks of a host are '', expected"),
        ([[0, 1, 2, 3], []], "a host has no rank"),
    ],
)
def test_hosts_that_cannot_be_are_refused(hosts: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build("leaders", "all_reduce", 4, hosts=hosts)


def test_a_grid_takes_equal_hosts_of_consecutive_ranks_alone() -> None:
    assert build("hierarchical", "all_reduce", 6, hosts="3x2") == build("hierarchical", "all_reduce", 6, hosts=3)
    with pytest.raises(UsageError, match="hosts of 4\\+2 are no grid: take leaders or columns"):
        build("hierarchical", "all_reduce", 6, hosts="4+2")


def test_switches_between_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match="algorithm leaders does not fit all_reduce: in_network needs a switch"):
        build("leaders", "all_reduce", 4, inter="in_network")


def test_three_thousand_hosts_are_built_lazily() -> None:
    schedule = build("columns", "all_reduce", 24000, hosts="3000x8", inter="ring")
    assert schedule.num_steps == 2 + 2 * 2999
    assert len(schedule.steps[0]) == 24000 * 7
    assert np.unique(schedule.steps[1].src).size == 24000
