"""The choice of algorithm: against formulas, against plain simulation, with measured tables, in words."""

import pytest

from unisono.algorithms import build, list_algorithms, names, register_algorithm, registry
from unisono.errors import UsageError
from unisono.schedule import (
    COLLECTIVES,
    LINKS,
    Collective,
    Link,
    Schedule,
    Step,
    Topology,
    as_hosts,
    cluster,
    joined,
    preset,
)
from unisono.selection import SIZES, Measured, Row, Selector, explain, ranges, select
from unisono.selection import selector as selector_module
from unisono.simulation import simulate
from unisono.verification import verify

A, B = 2e-6, 1 / 8e9


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves some algorithms to choose from."""
    known = selector_module.list_algorithms
    monkeypatch.setattr(selector_module, "list_algorithms", lambda what: [e for e in known(what) if e.name in names])


def flat(n: int, gamma: float = 0.0) -> Topology:
    return Topology("flat", 1, n, Link("wire", A, B), None, gamma)


@pytest.mark.parametrize("n", [4, 8, 16])
def test_crossover_of_one_shot_and_two_phase_is_the_formula_s(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "one_shot", "two_phase")
    selector = Selector("all_reduce", flat(n))
    (crossover,) = selector.crossovers(selector.table())
    assert (crossover.below, crossover.above) == ("one_shot", "two_phase")
    assert crossover.nbytes == pytest.approx(A / ((n - 1) * (1 - 2 / n) * B), rel=0.01)


def test_crossover_of_doubling_and_ring_is_where_their_formulas_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    n, lg = 16, 4
    only(monkeypatch, "recursive_doubling", "ring")
    selector = Selector("all_reduce", flat(n))
    (crossover,) = selector.crossovers(selector.table())
    assert crossover.nbytes == pytest.approx((2 * (n - 1) - lg) * A / ((lg - 2 * (n - 1) / n) * B), rel=0.01)


@pytest.mark.parametrize("nbytes", [4, 3000, 1 << 20, 77_777_777, 1 << 31])
def test_quotes_are_the_simulated_times_and_sorted(nbytes: int) -> None:
    topology = cluster(2, 4)
    selector = Selector("all_reduce", topology)
    selector.table(SIZES[::4])  # so that some curves are known to be straight
    choice = selector.choose(nbytes)
    seconds = [q.seconds for q in choice.quotes]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-5)
    for quote in choice.quotes:
        assert quote.seconds == pytest.approx(simulate(choice.schedule(quote), topology, nbytes).time, rel=1e-5)
    assert simulate(choice.build(), topology, nbytes).time == pytest.approx(choice.best.seconds, rel=1e-5)


def test_pieces_are_near_the_formula_s_best(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "chain")
    n, nbytes = 10, 1 << 24
    best = ((n - 2) * nbytes * B / A) ** 0.5
    (quote,) = Selector("broadcast", flat(n)).choose(nbytes).quotes
    assert best / 2 < quote.chunks < best * 2


def test_small_messages_want_few_steps_and_large_ones_few_bytes() -> None:
    assert select("all_reduce", 4, preset("infiniband", 16)).best.candidate.algorithm.steps(16) <= 4
    assert select("all_reduce", 1 << 28, preset("infiniband", 16)).best.candidate.algorithm.nbytes_per_rank(16) < 2


def test_hosts_are_used_as_they_are() -> None:
    best = select("all_reduce", 1 << 24, cluster(4, 16)).best
    assert best.candidate.algorithm.name in ("columns", "hierarchical")
    assert dict(best.candidate.options)["hosts"] == 4
    unequal = as_hosts("5+2+1", 8)
    links = ((LINKS["ethernet"],) * 3,) * 3
    best = select("all_reduce", 1 << 20, joined(unequal, LINKS["shared_memory"], links)).best
    assert dict(best.candidate.options)["hosts"] == unequal
    assert dict(select("all_reduce", 64, flat(4)).left_out)["hierarchical"] == "has one host to work on"
    alone = dict(select("all_reduce", 64, preset("ethernet", 4)).left_out)
    assert alone["hierarchical"] == "has one rank on every host"


def test_in_network_is_left_out() -> None:
    assert dict(select("all_reduce", 64, flat(4)).left_out)["in_network"] == "needs a switch that sums"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_collective_gets_a_schedule_that_is_proved(collective: str, n: int) -> None:
    choice = select(collective, 1 << 12, flat(n))
    assert choice.build().collective.name == collective
    assert verify(choice.build()).ok
    assert explain(choice)


def test_a_large_cluster_is_planned_without_building_the_impossible() -> None:
    choice = select("all_reduce", 8, preset("cluster", 4096))
    assert dict(choice.left_out)["one_shot"] == "has too many messages to simulate"
    assert choice.best.seconds < 1e-4


def rows(times: dict[str, float], nbytes: int = 1024) -> Measured:
    return Measured(Row("all_reduce", 4, name, nbytes, seconds) for name, seconds in times.items())


def test_what_was_measured_counts_more_than_the_model() -> None:
    table = rows({"star": 1e-6, "ring": 5e-6, "default": 1e-7})
    choice = select("all_reduce", 1024, flat(4), measured=table)
    assert [(q.label, q.seconds, q.measured) for q in choice.quotes] == [("star", 1e-6, True), ("ring", 5e-6, True)]
    assert dict(choice.left_out)["tree"] == "not measured"
    assert explain(choice)[2] == "because it was the fastest measured: 2 steps, the busiest rank sends 3 × the bytes"
    assert not select("all_reduce", 1024, flat(8), measured=table).best.measured
    assert not select("broadcast", 1024, flat(4), measured=table).best.measured


def test_measured_crossovers() -> None:
    table = rows({"star": 1e-6, "ring": 4e-6}, 1 << 10).merged(rows({"star": 64e-6, "ring": 16e-6}, 1 << 14))
    selector = Selector("all_reduce", flat(4), measured=table)
    choices = selector.table([1 << 10, 1 << 14])
    (crossover,) = selector.crossovers(choices)
    assert crossover.nbytes == pytest.approx(1 << 12, rel=0.02)  # star grows by 4 per 2 bits, ring by 1 per 2 bits
    assert ranges(choices, [crossover]).startswith("star up to 4")


@pytest.fixture
def _unchanged_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    names()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.usefixtures("_unchanged_registry")
def test_one_function_adds_an_algorithm_that_is_selected() -> None:
    @register_algorithm("telepathy", "all_reduce", steps="0", nbytes_per_rank="0")
    def telepathy(world_size: int, chunks: int = 1) -> Schedule:
        """Everybody knows already."""
        return Schedule("telepathy", Collective.of("all_reduce", world_size, chunks), ())

    best = select("all_reduce", 1 << 20, flat(8)).best
    assert (best.label, best.seconds) == ("telepathy", 0.0)


@pytest.mark.usefixtures("_unchanged_registry")
def test_an_algorithm_that_does_not_fit_is_left_out_with_its_reason() -> None:
    @register_algorithm("pairs", "all_reduce", steps="1", nbytes_per_rank="1")
    def pairs(world_size: int, chunks: int = 1) -> Schedule:
        """For two."""
        if world_size != 2:
            raise UsageError("algorithm pairs does not fit all_reduce: it is for 2 ranks")
        both = Step.make([0, 1], [1, 0], 0, chunks, True)
        return Schedule("pairs", Collective.of("all_reduce", world_size, chunks), (both,))

    assert "it is for 2 ranks" in dict(select("all_reduce", 64, flat(3)).left_out)["pairs"]
    assert "pairs" in {q.label for q in select("all_reduce", 64, flat(2)).quotes}


def test_explains_in_words() -> None:
    lines = explain(select("all_reduce", 1 << 20, flat(8)))
    assert lines[0] == "all_reduce of 1 MiB over 8 ranks: two_phase, 233 µs by the model"
    assert lines[1] == "on flat: 8 ranks over wire (2 µs, 8 GB/s, switched)"
    assert lines[2] == (
        "because bytes on the wire dominate, so what the busiest link carries decides "
        "(2 % start-up, 98 % bytes, 0 % sums): 2 steps, the busiest rank sends 1.75 × the bytes"
    )
    assert lines[3].endswith("times as long: 6 steps, the busiest rank sends 1.75 × the bytes")
    assert "start-up of messages dominates" in explain(select("all_reduce", 4, flat(8)))[2]
    assert "adding up dominates" in explain(select("all_reduce", 1 << 20, flat(8, gamma=10 * B)))[2]
    assert "nobody to talk to" in explain(select("all_reduce", 4, flat(1)))[2]


def test_shares_add_up_to_the_time() -> None:
    choice = select("all_reduce", 1 << 20, flat(8, gamma=B))
    assert sum(choice.shares.values()) == pytest.approx(choice.best.seconds)


def test_bandwidth_of_the_best() -> None:
    choice = select("all_reduce", 1 << 20, flat(8))
    line = simulate(build("two_phase", "all_reduce", 8), flat(8), 1 << 20)
    assert choice.busbw == pytest.approx(line.busbw)


@pytest.mark.parametrize(
    ("collective", "nbytes", "message"),
    [("allreduce", 4, "unknown collective 'allreduce'"), ("all_reduce", -1, "must be at least 0 bytes")],
)
def test_refuses_what_makes_no_sense(collective: str, nbytes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(collective, nbytes, flat(4))


def test_nothing_to_choose_from_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "in_network")
    with pytest.raises(UsageError, match="in_network needs a switch that sums"):
        Selector("all_reduce", flat(4))


def test_every_entry_is_quoted_or_left_out() -> None:
    choice = select("reduce_scatter", 4096, flat(6))
    named = {q.candidate.algorithm.name for q in choice.quotes} | set(dict(choice.left_out))
    assert named == {e.name for e in list_algorithms() if e.collective == "reduce_scatter"}
