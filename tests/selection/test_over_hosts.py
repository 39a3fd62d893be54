"""The choice over hosts: what the links ask for, alike for equal topologies, one order of sums at every size."""

import time

import pytest

from unisono.errors import UsageError
from unisono.schedule import COLLECTIVES, Link, Memory, Topology, as_hosts, joined, preset
from unisono.selection import over_hosts
from unisono.verification import order_by_runs, sum_order, verify

NEAR = Link("near", 1e-5, 2e-10)
MEMORY = Memory(1e-5, 1e-5, 2e-10, 2)
GIGABIT = Link("gigabit", 4e-4, 8 / 940e6, announcement=1e-4, further=5e-5)
SLOW = Link("slow", 2.1e-2, 8 / 90e6, announcement=1e-2, further=5e-5)
SIZES = (4, 64 << 10, 1 << 20, 64 << 20)


def links(cut: str, ranks: int, far: Link) -> Topology:
    hosts = as_hosts(cut, ranks)
    return joined(hosts, NEAR, ((far,) * len(hosts),) * len(hosts), 1e-10, MEMORY)


def test_few_messages_for_small_tensors_and_pieces_for_large_ones() -> None:
    for far in (GIGABIT, SLOW):
        small, middle, _, large = (over_hosts("all_reduce", size, links("2x2", 4, far)) for size in SIZES)
        assert (small.algorithm, middle.algorithm) == ("leaders", "leaders")
        assert large.algorithm == "columns" or far is SLOW
        assert 4 <= large.chunks <= 32 or far is SLOW
        floor = far.beta * SIZES[-1]
        assert floor < large.seconds < 1.15 * floor


def test_many_hosts_do_not_send_all_to_all_when_tensors_are_large() -> None:
    topology = links("8x2", 16, GIGABIT)
    assert over_hosts("all_reduce", 4, topology).algorithm == "leaders"
    large = over_hosts("all_reduce", 1 << 20, topology)
    assert large.algorithm == "columns"
    assert large.seconds < 2.5 * GIGABIT.beta * (1 << 20)


@pytest.mark.parametrize("cut", ["2x2", "3+1", "4x1", "0,2/1,3"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_choice_is_proved_and_sums_alike_at_every_size(collective: str, cut: str) -> None:
    topology = links(cut, 4, GIGABIT)
    for size in SIZES:
        schedule = over_hosts(collective, size, topology).build(0)
        assert verify(schedule).ok
        assert sum_order(schedule).orders in ((), (order_by_runs(as_hosts(cut, 4)),))


def test_equal_topologies_choose_alike_and_links_count() -> None:
    again = over_hosts("broadcast", 1 << 20, links("2x2", 4, SLOW))
    assert again == over_hosts("broadcast", 1 << 20, links("2x2", 4, SLOW))
    assert again.build() is over_hosts("broadcast", 1 << 20, links("2x2", 4, SLOW)).build()
    assert over_hosts("all_reduce", 4, links("2x2", 4, SLOW)).seconds > SLOW.alpha


def test_a_choice_takes_no_time_once_its_kind_is_known() -> None:
    topology = links("4x4", 16, GIGABIT)
    over_hosts("all_reduce", 64 << 20, topology)
    began = time.process_time()
    for size in range(1, 51):
        over_hosts("all_reduce", size << 20, topology)
    assert time.process_time() - began < 0.5


def test_what_there_is_no_choice_for() -> None:
    with pytest.raises(UsageError, match="has one host: the defaults serve it"):
        over_hosts("all_reduce", 4, preset("shared_memory", 4))
    with pytest.raises(UsageError, match="unknown collective 'sum'"):
        over_hosts("sum", 4, links("2x2", 4, SLOW))
