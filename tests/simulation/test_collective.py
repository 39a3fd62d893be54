"""The simulator against the textbook's formulas, against a slow reference, and at the size of a large cluster."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build, list_algorithms
from unisono.errors import UsageError
from unisono.schedule import Collective, Link, Schedule, Step, Topology, Transfer, cluster, preset
from unisono.simulation import Timeline, simulate
from unisono.simulation import clock as clock_module
from unisono.simulation import recording as events_module

A, B, G = 3e-6, 1 / 7e9, 1 / 11e9
S = float(1 << 22)
ONE_PERCENT = 0.01


def flat(n: int, gamma: float = G, switched: bool = True) -> Topology:
    return Topology("flat", 1, n, Link("wire", A, B, switched), None, gamma)


def run(
    name: str, collective: str, n: int, topology: Topology | None = None, nbytes: float = S, **how: int
) -> Timeline:
    return simulate(build(name, collective, n, **how), topology or flat(n), nbytes)


def ring_all_reduce(n: int, s: float, a: float = A, b: float = B, g: float = G) -> float:
    return 2 * (n - 1) * a + 2 * (n - 1) / n * s * b + (n - 1) / n * s * g


FORMULAS = {
    ("ring", "all_reduce"): lambda n, lg, s: ring_all_reduce(n, s),
    ("ring", "all_gather"): lambda n, lg, s: (n - 1) * A + (n - 1) / n * s * B,
    ("ring", "reduce_scatter"): lambda n, lg, s: (n - 1) * A + (n - 1) / n * s * (B + G),
    ("bidirectional_ring", "all_reduce"): lambda n, lg, s: ring_all_reduce(n, s),  # one port a rank: nothing gained
    ("tree", "all_reduce"): lambda n, lg, s: 2 * lg * (A + s * B) + lg * s * G,
    ("tree", "broadcast"): lambda n, lg, s: lg * (A + s * B),
    ("tree", "reduce"): lambda n, lg, s: lg * (A + s * (B + G)),
    ("recursive_doubling", "all_reduce"): lambda n, lg, s: lg * (A + s * B + s * G),
    ("halving_doubling", "all_reduce"): lambda n, lg, s: 2 * lg * A + 2 * (n - 1) / n * s * B + (n - 1) / n * s * G,
    ("one_shot", "all_reduce"): lambda n, lg, s: A + (n - 1) * s * (B + G),
    ("two_phase", "all_reduce"): lambda n, lg, s: 2 * A + 2 * (n - 1) / n * s * B + (n - 1) / n * s * G,
    ("direct", "all_to_all"): lambda n, lg, s: A + (n - 1) / n * s * B,
    ("bruck", "all_to_all"): lambda n, lg, s: lg * A + lg / 2 * s * B,
    ("bruck", "all_gather"): lambda n, lg, s: lg * A + (n - 1) / n * s * B,
    ("bruck", "barrier"): lambda n, lg, s: lg * A,
    ("star", "all_reduce"): lambda n, lg, s: 2 * (A + (n - 1) * s * B) + (n - 1) * s * G,
    ("star", "gather"): lambda n, lg, s: A + (n - 1) / n * s * B,
}


@pytest.mark.parametrize("n", [2, 4, 8, 32])
@pytest.mark.parametrize("nbytes", [4.0, 65536.0, S])
@pytest.mark.parametrize(("name", "collective"), FORMULAS)
def test_equals_the_formula(name: str, collective: str, n: int, nbytes: float) -> None:
    expected = FORMULAS[name, collective](n, log2(n), nbytes)
    assert run(name, collective, n, nbytes=nbytes).time == pytest.approx(expected, rel=ONE_PERCENT)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 24])
def test_equals_the_formula_for_any_number_of_ranks(n: int) -> None:
    lg = ceil(log2(n))
    folded = 2 * A + 2 * S * B + S * G
    p = 1 << (n.bit_length() - 1)
    halving = 2 * log2(p) * A + 2 * (p - 1) / p * S * B + (p - 1) / p * S * G
    assert run("ring", "all_reduce", n).time == pytest.approx(ring_all_reduce(n, S), rel=ONE_PERCENT)
    assert run("tree", "broadcast", n).time == pytest.approx(lg * (A + S * B), rel=ONE_PERCENT)
    assert run("halving_doubling", "all_reduce", n).time == pytest.approx(halving + folded, rel=ONE_PERCENT)


@pytest.mark.parametrize("k", [1, 4, 32, 200])
@pytest.mark.parametrize("n", [2, 3, 8, 20])
def test_pipelined_chain(n: int, k: int) -> None:
    expected = (n - 2 + k) * (A + S * B / k)
    assert run("chain", "broadcast", n, chunks=k).time == pytest.approx(expected, rel=ONE_PERCENT)
    whole = build("chain", "broadcast", n)
    assert simulate(whole, flat(n), S, chunks=k).time == pytest.approx(expected, rel=ONE_PERCENT)


def test_chain_is_best_at_the_formula_s_number_of_segments() -> None:
    n = 16
    best = np.sqrt((n - 2) * S * B / A)
    nearby = (round(best * share) for share in (0.25, 0.5, 0.9, 0.95, 1.0, 1.05, 1.1, 2.0))
    times = {k: run("chain", "broadcast", n, chunks=k).time for k in nearby}
    assert min(times, key=times.__getitem__) == pytest.approx(best, abs=1)


@pytest.mark.parametrize("n", [4, 8, 16, 31, 64])
@pytest.mark.parametrize("k", [1, 8, 64])
def test_double_tree_keeps_its_bound_and_reaches_the_bytes(n: int, k: int) -> None:
    lg = ceil(log2(n))
    slot = A + S * B / (2 * k)
    broadcast = run("double_tree", "broadcast", n, flat(n, gamma=0.0), chunks=k).time
    assert broadcast <= (2 * lg + 2 * k) * slot * (1 + ONE_PERCENT)
    assert broadcast >= 2 * k * slot * (1 - ONE_PERCENT)
    all_reduce = run("double_tree", "all_reduce", n, flat(n, gamma=0.0), chunks=k).time
    assert all_reduce <= (4 * lg + 4 * k) * slot * (1 + ONE_PERCENT)


def test_double_tree_takes_the_time_of_its_bytes_when_long() -> None:
    n, k, nbytes = 8, 128, float(1 << 32)
    lg = ceil(log2(n))
    assert run("double_tree", "broadcast", n, nbytes=nbytes, chunks=k).time == pytest.approx(nbytes * B, rel=0.03)
    best = round(np.sqrt(lg * S * B / (2 * A)))
    closed = 2 * lg * A + S * B + 2 * np.sqrt(2 * lg * A * S * B)
    assert run("double_tree", "broadcast", n, chunks=best).time <= closed * (1 + ONE_PERCENT)


def two_levels(hosts: int, local: int, nics: int, gamma: float = G) -> Topology:
    return Topology("two", hosts, local, Link("in", A, B), Link("out", 5 * A, 4 * B), gamma, nics)


@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (4, 4), (3, 8)])
def test_grid_costs_two_levels_of_rings(hosts: int, local: int) -> None:
    n = hosts * local
    rows = 2 * (local - 1) * A + (local - 1) / local * S * (2 * B + G)
    expected = rows + ring_all_reduce(hosts, S / local, 5 * A, 4 * B)
    seen = simulate(build("grid", "all_reduce", n, rows=hosts), two_levels(hosts, local, local), S)
    assert seen.time == pytest.approx(expected, rel=ONE_PERCENT)


@pytest.mark.parametrize("nics", [1, 2, 4])
def test_ranks_of_a_host_share_its_nics(nics: int) -> None:
    hosts, local, nbytes = 4, 4, float(1 << 28)  # long: the formula has no rings that take turns at alpha and sums
    inside = 2 * (local - 1) * A + 2 * (local - 1) / local * nbytes * B
    shared = ring_all_reduce(hosts, nbytes / nics, 5 * A, 4 * B, 0.0)
    s = build("hierarchical", "all_reduce", hosts * local, hosts=hosts)
    seen = simulate(s, two_levels(hosts, local, nics, 0.0), nbytes)
    assert seen.time == pytest.approx(inside + shared, rel=ONE_PERCENT)


@pytest.mark.parametrize("k", [1, 8])
def test_a_switch_that_sums(k: int) -> None:
    expected = (k + 1) * (A + S * B / k)
    assert run("in_network", "all_reduce", 8, chunks=k).time == pytest.approx(expected, rel=ONE_PERCENT)


def test_wires_between_pairs_are_not_shared() -> None:
    n = 8
    wired = flat(n, 0.0, switched=False)
    assert run("one_shot", "all_reduce", n, wired).time == pytest.approx(A + S * B)
    both = run("bidirectional_ring", "all_reduce", n, wired).time
    assert both == pytest.approx(2 * (n - 1) * A + (n - 1) / n * S * B)


def test_eager_messages_leave_alpha_to_the_wire() -> None:
    n, k = 8, 16
    chain = build("chain", "broadcast", n, chunks=k)
    seen = simulate(chain, flat(n), S, eager=True)
    assert seen.time == pytest.approx((n - 1) * A + (n - 2 + k) * S * B / k)
    hosts = cluster(4, 8)
    near, far = hosts.intra.alpha, hosts.link(0, 8).alpha
    ring = simulate(build("ring", "all_reduce", 32), hosts, 0.0, eager=True)
    assert ring.time == pytest.approx(62 * near + 8 * (far - near))  # 62 links in a row, 8 of them between hosts
    slow = simulate(build("ring", "all_reduce", 32), hosts, 0.0)
    assert slow.time == pytest.approx(2 * 31 * far)


def reference(schedule: Schedule, topology: Topology, nbytes: float) -> np.ndarray:
    """Ends by the rules of the clock, one message at a time, for steps where no port meets two messages."""
    ready = np.zeros(schedule.world_size)
    size = schedule.collective.chunk_nbytes(nbytes)
    for step in schedule.explicit_steps():
        before = ready.copy()
        for t in step:
            link = topology.link(t.src, t.dst)
            end = max(before[t.src], before[t.dst]) + link.alpha + t.count * size * link.beta
            ready[t.src], ready[t.dst] = max(ready[t.src], end), max(ready[t.dst], end)
        for t in step:
            ready[t.dst] += t.count * size * topology.gamma * t.reduce
    return ready


@settings(max_examples=60)
@given(
    st.sampled_from(["ring", "tree", "double_tree", "recursive_doubling", "chain", "grid"]),
    st.sampled_from([(1, 5), (2, 4), (3, 3), (4, 2), (9, 1), (2, 7)]),
    st.integers(1, 5),
    st.integers(0, 1 << 20),
)
def test_equals_a_reference_that_goes_message_by_message(
    name: str, shape: tuple[int, int], chunks: int, nbytes: int
) -> None:
    hosts, local = shape
    topology = two_levels(hosts, local, local)
    schedule = build(name, "all_reduce", topology.world_size, chunks=chunks)
    assert simulate(schedule, topology, nbytes).end == pytest.approx(reference(schedule, topology, nbytes))


def explicit(schedule: Schedule) -> Schedule:
    return replace(schedule, steps=tuple(schedule.explicit_steps()))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", ["ring", "bidirectional_ring", "double_ring"])
@pytest.mark.parametrize("nics", [8, 2])
def test_leaps_change_nothing(monkeypatch: pytest.MonkeyPatch, name: str, chunks: int, eager: bool, nics: int) -> None:
    topology = cluster(4, 8, nics)
    schedule = build(name, "all_reduce", 32)
    slow = simulate(explicit(schedule), topology, S, chunks, eager=eager)
    monkeypatch.setattr(events_module, "EVENT_LIMIT", 0)
    advances = count_calls(monkeypatch)
    fast = simulate(schedule, topology, S, chunks, eager=eager)
    assert fast.end == pytest.approx(slow.end, rel=1e-6)
    assert fast.start == pytest.approx(slow.start, rel=1e-6)
    assert np.array_equal(fast.traffic.src, slow.traffic.src)
    assert fast.traffic.nbytes == pytest.approx(slow.traffic.nbytes)
    assert np.array_equal(fast.traffic.messages, slow.traffic.messages)
    assert len(advances) < 2 * 31 + chunks - 1


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    advance = clock_module.Clock.advance

    def counted(self: clock_module.Clock, load: object) -> object:
        calls.append(1)
        return advance(self, load)  # type: ignore[arg-type]

    monkeypatch.setattr(clock_module.Clock, "advance", counted)
    return calls


def test_events_are_every_transfer_in_order() -> None:
    schedule = build("ring", "all_reduce", 4)
    line = simulate(schedule, flat(4), S)
    events = line.events
    rows = zip(*(getattr(events, c).tolist() for c in ("step", "src", "dst", "chunk", "count", "reduce")), strict=True)
    expected = [
        (i, t.src, t.dst, t.chunk, t.count, t.reduce) for i, step in enumerate(schedule.explicit_steps()) for t in step
    ]
    assert list(rows) == expected
    assert events.nbytes.tolist() == [S / 4] * 24
    assert events.end - events.start == pytest.approx(np.full(24, A + S / 4 * B))
    assert events.end.max() == line.time
    assert line.start.tolist() == [0.0] * 4


def test_events_tell_the_pieces_apart() -> None:
    events = simulate(build("chain", "broadcast", 3), flat(3), S, chunks=2).events
    assert list(zip(events.step.tolist(), events.piece.tolist(), strict=True)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert events.nbytes.tolist() == [S / 2] * 4


@pytest.mark.parametrize("entry", list_algorithms(), ids=lambda e: f"{e.name}-{e.collective}")
def test_no_port_ever_carries_more_than_it_can(entry) -> None:  # type: ignore[no-untyped-def]
    """Up to any moment, the messages that have ended at a port have not needed more time than has passed."""
    topology = two_levels(3, 3, 1)
    for chunks in (1, 2):
        line = simulate(build(entry.name, entry.collective, 9, chunks=chunks), topology, S)
        e = line.events
        assert (e.start >= 0).all()
        out, into = topology.ports(e.src, e.dst)
        for ports in (out, into):
            for port in set(ports[ports >= 0].tolist()):
                there = ports == port
                work = e.nbytes[there] * topology.beta(e.src[there], e.dst[there])
                left = e.end[there] - topology.alpha(e.src[there], e.dst[there])
                order = np.argsort(left, kind="stable")
                assert (np.cumsum(work[order]) <= left[order] * (1 + 1e-9) + 1e-15).all()


def test_traffic_is_the_bytes_of_every_link() -> None:
    n = 8
    line = simulate(build("ring", "all_reduce", n), cluster(2, 4), S)
    assert line.traffic.src.tolist() == list(range(n))
    assert line.traffic.dst.tolist() == [(r + 1) % n for r in range(n)]
    assert line.traffic.nbytes == pytest.approx(np.full(n, 2 * (n - 1) / n * S))
    assert line.traffic.num_messages == n * 2 * (n - 1)
    kinds = line.traffic.by_kind(line.topology)
    assert kinds == pytest.approx({"nvlink": 6 * 2 * (n - 1) / n * S, "infiniband": 2 * 2 * (n - 1) / n * S})
    assert line.traffic.sent(n) == pytest.approx(line.traffic.nbytes)


def test_bandwidths_are_those_of_ncclt_tests() -> None:
    line = run("ring", "all_reduce", 8)
    assert line.algbw == pytest.approx(S / line.time)
    assert line.busbw == pytest.approx(line.algbw * 2 * 7 / 8)
    assert run("tree", "broadcast", 8).busbw == pytest.approx(S / run("tree", "broadcast", 8).time)
    assert run("bruck", "barrier", 8).busbw == 0


def test_critical_path_in_words() -> None:
    s = Schedule(
        "relay",
        Collective.of("reduce", 3),
        (Step.of(Transfer(2, 1, 0, reduce=True)), Step.of(Transfer(1, 0, 0, reduce=True))),
    )
    topology = Topology("simple", 1, 3, Link("wire", 1e-6, 1e-9), None, 1e-9)
    assert simulate(s, topology, 1000).critical_path() == [
        "     0 s  step 0: rank 1 waits for rank 2: 1000 B over wire, then sums for 1 µs",
        "    3 µs  step 1: rank 0 waits for rank 1: 1000 B over wire, then sums for 1 µs",
        "    6 µs  rank 0 is the last to end",
    ]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "name", ["ring", "tree", "double_tree", "chain", "one_shot", "two_phase", "grid", "in_network"]
)
def test_critical_path_leads_without_a_gap_from_zero_to_the_end(name: str, eager: bool) -> None:
    for topology in (flat(8), two_levels(2, 4, 4), two_levels(4, 2, 1)):
        path = simulate(build(name, "all_reduce", 8, chunks=2), topology, S, eager=eager).path
        assert path.complete
        assert path.hops[0].start - path.hops[0].queued == pytest.approx(0.0, abs=1e-15)
        if topology.nics == topology.ranks_per_host and not eager:
            assert sum(path.shares().values()) == pytest.approx(path.time)
            reached = [hop.end + hop.summing for hop in path.hops]
            for end, (_, following) in zip(reached, pairwise(path.hops), strict=False):
                assert following.start - following.queued == pytest.approx(end)
            assert reached[-1] == pytest.approx(path.time)


def test_critical_path_names_a_slow_receiver_and_a_taken_port() -> None:
    late = Schedule(
        "late",
        Collective.of("broadcast", 3),
        (Step.of(Transfer(1, 2, 0)), Step.of(Transfer(0, 1, 0)), Step.of(Transfer(0, 2, 0))),
    )
    words = "\n".join(simulate(late, flat(3), S).critical_path())
    assert "step 0: rank 1 waits for rank 2 to take 4 MiB" in words
    star = "\n".join(run("star", "gather", 4).critical_path())
    assert "in line for a port" in star


def test_a_long_path_is_cut_at_the_front() -> None:
    lines = run("ring", "all_reduce", 8).critical_path(limit=3)
    assert lines[0] == "     ...  11 earlier messages"
    assert len(lines) == 5


def test_one_rank_has_nothing_to_do() -> None:
    line = run("ring", "all_reduce", 1)
    assert (line.time, line.algbw, len(line.events), line.traffic.num_messages) == (0.0, 0.0, 0, 0)
    assert line.critical_path() == ["     0 s  rank 0 is the last to end"]


@pytest.mark.parametrize(
    ("topology", "nbytes", "chunks", "message"),
    [
        (flat(5), S, 1, "is for 4 ranks, but topology flat has 5"),
        (flat(4), -1.0, 1, "nbytes of at least 0"),
        (flat(4), float("nan"), 1, "nbytes of at least 0"),
        (flat(4), S, 0, "at least 1 chunk"),
    ],
)
def test_refuses_what_makes_no_sense(topology: Topology, nbytes: float, chunks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(build("ring", "all_reduce", 4), topology, nbytes, chunks)


def test_refuses_ranks_that_do_not_exist() -> None:
    bad = Schedule("bad", Collective.of("broadcast", 2), (Step.of(Transfer(0, 2, 0)),))
    with pytest.raises(UsageError, match="verify the schedule first"):
        simulate(bad, flat(2), S)


def test_too_many_events_are_refused_by_name() -> None:
    line = simulate(build("ring", "all_reduce", 1024), preset("nvlink", 1024), S)
    with pytest.raises(UsageError, match="ring over 1024 ranks makes 2095104 transfers"):
        _ = line.events


BIG = """
import json, resource, time
from unisono.algorithms import build
from unisono.schedule import preset
from unisono.simulation import simulate
seen = []
for name in ("ring", "tree", "double_tree"):
    for eager in (False, True):
        began = time.process_time()
        line = simulate(build(name, "all_reduce", 24576), preset("cluster", 24576), 4, eager=eager)
        line.critical_path()
        seen.append([name, eager, line.time, time.process_time() - began])
print(json.dumps([seen, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def test_24576_ranks_in_seconds_and_the_known_picture() -> None:
    out = subprocess.run([sys.executable, "-c", BIG], check=True, capture_output=True, text=True).stdout
    seen, memory = json.loads(out)
    assert memory < 2 << 30
    assert all(seconds < 10 for *_, seconds in seen)
    for eager in (False, True):
        ring, tree, double_tree = (time for _, e, time, _ in seen if e is eager)
        assert 100 <= ring / double_tree <= 1100
        assert tree < ring / 100
    assert seen[1][2] == pytest.approx(
        42.4e-3, rel=ONE_PERCENT
    )  # NCCL's estimate adds up alpha around the ring: 42-47 ms


def test_imports_no_torch() -> None:
    code = "import sys, unisono.simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
