"""The times of bound tables over hosts, by hand: frames, what is due meetings later, pieces that fill the link."""

import json
from pathlib import Path
from statistics import median

import pytest

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.program import Table
from unisono.program.over_hosts import bind_over_hosts
from unisono.runtime.choice import by_hosts
from unisono.schedule import Hosts, Link, Memory, Schedule, Topology, as_hosts, joined
from unisono.simulation import simulate_tables
from unisono.transport.layout import Layout

WAY, BETA = 10e-3, 1e-8
"""Seconds of a link one way, and per byte."""


def links(cut: str, ranks: int, way: float = WAY, beta: float = BETA, memory: Memory | None = None) -> Topology:
    far, hosts = Link("far", 2 * way, beta, announcement=way), as_hosts(cut, ranks)
    return joined(hosts, Link("none", 0.0, 0.0), ((far,) * len(hosts),) * len(hosts), memory=memory)


def tables(
    schedule: Schedule, nbytes: int, hosts: Hosts, cap: int = 1 << 40, placement: str = "staged", stage: int = 0
) -> list[Table]:
    c = schedule.collective
    blocks = [nbytes] * (c.num_chunks // c.pieces)
    return [
        bind_over_hosts(
            schedule, r, placement, blocks, hosts, stage=stage or Layout(c.world_size).stage, cap=cap
        )
        for r in range(c.world_size)
    ]  # fmt: skip


def time(made: list[Table], where: Topology) -> float:
    return float(simulate_tables(made, where).max())


def test_a_call_of_one_meeting_is_one_way_and_its_bytes() -> None:
    two, four = links("2x1", 2), links("2x2", 4)
    exchange = tables(build("one_shot", "all_reduce", 2), 100_000, two.ranks_of_hosts)
    assert time(exchange, two) == pytest.approx(WAY + 100_000 * BETA)
    both = tables(build("one_shot", "all_reduce", 4), 100_000, four.ranks_of_hosts)
    assert time(both, four) == pytest.approx(WAY + 2 * 100_000 * BETA)  # the ranks of a host share its port


def test_what_has_no_room_at_the_first_meeting_goes_once_the_headers_are_there() -> None:
    where = links("2x1", 2)
    made = tables(build("one_shot", "all_reduce", 2), 3 << 20, where.ranks_of_hosts, stage=4 << 20)
    assert (made[0].meetings, made[0].late) == (1, 0)
    assert time(made, where) == pytest.approx(2 * WAY + (3 << 20) * BETA)


def prefix(pieces: int, piece: int, where: Topology) -> list[Table]:
    """Partial sums from host 0 to host 1, the totals back."""
    made = build("prefix", "all_reduce", 2, hosts=where.ranks_of_hosts)
    found = tables(made, pieces * piece, where.ranks_of_hosts, piece)
    assert (found[0].late, found[0].meetings) == (2, pieces + 5)  # two times three lags, but for the last meeting
    return found


@pytest.mark.parametrize(("pieces", "ways"), [(2, 3), (4, 3), (6, 3), (7, 4), (8, 5), (12, 5), (13, 6), (16, 7)])
def test_of_short_pieces_six_take_a_way_there_and_back(pieces: int, ways: int) -> None:
    """A meeting waits for what was sent three before, up as well as down; the headers take the first way."""
    where = links("2x1", 2, beta=0.0)
    assert time(prefix(pieces, 64, where), where) == pytest.approx(ways * WAY)


def test_long_pieces_fill_the_link() -> None:
    """Partial sums go up one after the other while totals come down; the last total is a piece and a way behind."""
    where, piece = links("2x1", 2), 1 << 20
    way_up, work = WAY + 8 * piece * BETA, WAY + piece * BETA
    assert 3 * piece * BETA > 2 * WAY  # what is under way covers a way there and back
    assert time(prefix(8, piece, where), where) == pytest.approx(way_up + work)


def test_ranks_of_a_host_meet_and_share_cores() -> None:
    memory = Memory(call=1e-3, meeting=2e-3, copy=1e-9, cores=1)
    where = links("2x2", 4, memory=memory)
    made = tables(build("one_shot", "all_reduce", 4), 100_000, where.ranks_of_hosts)
    staged, read = 100_000 * 1e-9, 100_000 * 1e-9  # gamma is 0: a sum costs what it writes
    expected = 1e-3 + 2 * staged + WAY + 2 * 100_000 * BETA + 2 * read
    assert time(made, where) == pytest.approx(expected)
    near = links("2x2", 4, way=1e-4, beta=0.0, memory=memory)  # the meeting takes longer than the way
    assert time(made, near) == pytest.approx(1e-3 + 2 * staged + 2e-3 + 2 * read)


def test_on_one_host_only_memory_counts() -> None:
    memory = Memory(call=1e-3, meeting=2e-3, copy=1e-9, cores=2)
    where = joined(as_hosts("1x2", 2), Link("none", 0.0, 0.0), memory=memory)
    made = tables(build("one_shot", "all_reduce", 2), 100_000, where.ranks_of_hosts)
    assert time(made, where) == pytest.approx(1e-3 + 100_000 * 1e-9 + 2e-3 + 100_000 * 1e-9)


def test_what_cannot_be_played() -> None:
    where = links("2x1", 2)
    made = tables(build("one_shot", "all_reduce", 3), 8, as_hosts("3x1", 3))
    with pytest.raises(UsageError, match="topology measured needs the tables of its 2 ranks, in order"):
        simulate_tables(made, where)


RECORDS = Path(__file__).parents[2] / "benchmarks" / "over_hosts"
FRAMING = 1538 / 1448  # of a byte in TCP segments over Ethernet


@pytest.mark.parametrize(
    ("record", "way", "beta"), [("2x2_10ms_100mbit", 10e-3, 8e-8), ("2x2_0.1ms_1gbit", 1e-3, 8e-9)]
)
def test_recorded_calls_are_near_what_is_simulated(record: str, way: float, beta: float) -> None:
    """Each byte by the link's rate alone; a short call over 0.1 ms is 1 ms of processor time, by the record."""
    where = links("2x2", 4, way, beta * FRAMING, Memory(1e-5, 1e-5, 1e-10, 2))
    errors = []
    for row in json.loads((RECORDS / f"{record}.json").read_text()):
        collective, nbytes = row["collective"], row["nbytes"]
        if collective not in ("all_reduce", "all_gather", "all_to_all"):
            continue  # calls whose root, or whose ranks, run ahead of each other: their time is not that of one
        block = max(nbytes if collective == "all_reduce" else nbytes // 4, 4)
        choice = by_hosts(collective, block, 4, 0, True, where.ranks_of_hosts)
        made = tables(choice.schedule, block, where.ranks_of_hosts, choice.cap, choice.placement)
        errors.append(abs(time(made, where) / row["unisono"] - 1))
    assert len(errors) >= 12
    assert median(errors) < 0.15
