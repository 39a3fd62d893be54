"""The times of programs, by hand: what is announced, what is posted ahead, ports and turns."""

import pytest

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.program import lower
from unisono.schedule import Link, Memory, Schedule, Topology, as_hosts, joined, preset
from unisono.simulation import simulate, simulate_programs

FAR = Link("far", 21e-3, 1e-8, announcement=10e-3, further=1e-4)
NEAR = Link("near", 1e-3, 1e-9)


def topology(cut: str, ranks: int, memory: Memory | None = None, gamma: float = 0.0) -> Topology:
    hosts = as_hosts(cut, ranks)
    return joined(hosts, NEAR, ((FAR,) * len(hosts),) * len(hosts), gamma, memory)


def time(schedule: Schedule, where: Topology, nbytes: float) -> float:
    n = schedule.world_size
    return float(simulate_programs([lower(schedule, rank, "messages") for rank in range(n)], where, nbytes).max())


def test_an_exchange_costs_alpha_and_its_bytes() -> None:
    exchange = build("one_shot", "all_reduce", 2)
    assert time(exchange, topology("2x1", 2), 0) == pytest.approx(21e-3)
    assert time(exchange, topology("2x1", 2), 1e6) == pytest.approx(21e-3 + 10e-3)


def test_a_receive_that_was_posted_long_before_costs_no_round_trip() -> None:
    chain = build("chain", "broadcast", 3)
    assert time(chain, topology("3x1", 3), 0) == pytest.approx(21e-3 + 11e-3)


def test_a_host_has_one_port_and_every_further_message_costs_its_rank() -> None:
    star = build("star", "broadcast", 4)
    assert time(star, topology("4x1", 4), 1e6) == pytest.approx(21e-3 + 3 * 10e-3)
    assert time(star, topology("4x1", 4), 0) == pytest.approx(21e-3 + 2e-4)
    pairs = build("one_shot", "all_reduce", 4)
    inside = time(pairs, topology("2x2", 4), 1e6)
    assert inside == pytest.approx(21e-3 + 4 * 10e-3, rel=0.02)


def test_messages_without_elements_are_not_posted() -> None:
    """One element in four chunks, on a ring of four ranks: one of them travels, in six hops."""
    where, ring = topology("4x1", 4), build("ring", "all_reduce", 4)
    full, one = time(ring, where, 1600), time(ring, where, 4)
    programs = [lower(ring, rank, "messages") for rank in range(4)]
    assert full == pytest.approx(6 * 21e-3, rel=0.01)
    assert one == pytest.approx(21e-3 + 5 * 11e-3, rel=0.01)  # all other receives were posted long before
    assert simulate_programs(programs, where, 4, itemsize=1).max() == pytest.approx(full, rel=0.01)


def test_sums_take_their_time_and_ranks_take_turns() -> None:
    exchange = build("one_shot", "all_reduce", 2)
    memory = Memory(call=1e-5, meeting=1.0, copy=1e-9, cores=2)
    copied, summed = 1e-9 * 1e6, 3e-9 * 1e6
    there = NEAR.alpha + 1e6 * NEAR.beta
    apart = joined(as_hosts("1x2", 2), NEAR, gamma=3e-9, memory=memory)
    assert time(exchange, apart, 1e6) == pytest.approx(1e-5 + there + copied + summed)
    turns = joined(as_hosts("1x2", 2), NEAR, gamma=3e-9, memory=Memory(1e-5, 1.0, 1e-9, 1))
    assert time(exchange, turns, 1e6) == pytest.approx(1e-5 + there + 2 * (copied + summed))


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "tree", "two_phase"])
def test_without_announcements_programs_cost_what_their_schedule_does(name: str) -> None:
    flat = preset("ethernet", 8)
    for nbytes in (0, 1 << 20):
        schedule = build(name, "all_reduce", 8)
        where = joined(as_hosts("8x1", 8), flat.intra, ((flat.intra,) * 8,) * 8)
        assert time(schedule, where, nbytes) == pytest.approx(simulate(schedule, where, nbytes).time, rel=0.25)


def test_what_cannot_be_played() -> None:
    programs = [lower(build("ring", "all_reduce", 3), rank, "messages") for rank in range(3)]
    with pytest.raises(UsageError, match="topology measured needs the programs of its 2 ranks, in order"):
        simulate_programs(programs, topology("2x1", 2), 4)
    staged = [lower(build("star", "reduce", 2), rank, "staged") for rank in range(2)]
    with pytest.raises(UsageError, match="star reduce is staged, expected messages"):
        simulate_programs(staged, topology("2x1", 2), 4)
    silent = [lower(build("star", "broadcast", 2), 0, "messages"), lower(build("star", "reduce", 2), 1, "messages")]
    with pytest.raises(UsageError, match="wait for each other for ever"):
        simulate_programs(silent, topology("2x1", 2), 4)
