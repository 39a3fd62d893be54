import pytest

import unisono.algorithms.registry as registry
from unisono.algorithms import algorithm_info, build, names, register_algorithm
from unisono.errors import UsageError
from unisono.schedule import Collective, Schedule, Step
from unisono.verification import verify


@pytest.fixture
def _unchanged_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    names()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.usefixtures("_unchanged_registry")
def test_one_function_adds_an_algorithm() -> None:
    @register_algorithm("relay", "broadcast", steps="n-1", nbytes_per_rank="1")
    def relay(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
        """Each rank hands the whole to the next."""
        hops = [((root + i) % world_size, (root + i + 1) % world_size) for i in range(world_size - 1)]
        steps = tuple(Step.make(src, dst, 0, chunks) for src, dst in hops)
        return Schedule("relay", Collective.of("broadcast", world_size, chunks, root), steps)

    assert "relay" in names("broadcast")
    assert "relay" not in names("all_reduce")
    made = build("relay", "broadcast", 4, root=2)
    assert verify(made).ok
    assert made.num_steps == algorithm_info("relay", "broadcast").steps(4)
    assert relay(4, 2) == made
    inside = build("hierarchical", "broadcast", 6, root=4, intra="relay")
    assert verify(inside).ok


@pytest.mark.usefixtures("_unchanged_registry")
def test_an_all_reduce_is_also_a_barrier() -> None:
    @register_algorithm("mine", "all_reduce", steps="1", nbytes_per_rank="n-1")
    def mine(world_size: int, chunks: int = 1, flavour: str = "") -> Schedule:
        """All at once."""
        return build("one_shot", "all_reduce", world_size, chunks=chunks)

    barrier = build("mine", "barrier", 3, flavour="any")
    assert barrier.collective.name == "barrier"
    assert barrier.collective.chunk_nbytes(100.0) == 0
    assert verify(barrier).ok
    assert algorithm_info("mine", "barrier").options == ("flavour",)


@pytest.mark.usefixtures("_unchanged_registry")
def test_a_name_belongs_to_one_file() -> None:
    with pytest.raises(UsageError, match=r"algorithm ring all_reduce is already taken by unisono\.algorithms\.ring"):
        register_algorithm("ring", "all_reduce", steps="1", nbytes_per_rank="1")(lambda world_size, chunks=1: None)
    with pytest.raises(UsageError, match="unknown collective 'all_reduces'"):
        register_algorithm("mine", "all_reduces", steps="1", nbytes_per_rank="1")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("rnig", "all_reduce", 4), "unknown algorithm 'rnig': all_reduce is done by bidirectional_ring, bruck"),
        (
            ("ring", "gather", 4),
            "algorithm ring has no gather: it does all_gather, all_reduce, barrier, reduce_scatter",
        ),
        (("ring", "allreduce", 4), "unknown collective 'allreduce': expected one of all_reduce"),
        (("ring", "all_reduce", 0), "world_size must be at least 1, got 0"),
        (("ring", "all_reduce", 4, 0, 0), "chunks must be at least 1, got 0"),
        (("tree", "broadcast", 4, 4), "there is no rank 4 among 4 to be root"),
        (("ring", "all_reduce", 4, 1), "ring all_reduce has no root, got root=1"),
        (("1f1b", "pipeline", 4, 1), "1f1b is a pipeline schedule, which has no root, got root=1"),
        (("zb-v", "pipeline", 4, 0, 7), "zb-v is a pipeline schedule, which has no chunks, got chunks=7"),
    ],
)
def test_bad_calls_say_what_is_wrong(call: tuple[object, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build(*call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ring", {"colour": 1}, r"ring all_reduce has no option colour \(it has: none\)"),
        ("grid", {"rows": 4}, "algorithm grid does not fit all_reduce: 6 ranks do not make 4 rows"),
        ("hierarchical", {"hosts": 4}, "algorithm hierarchical does not fit all_reduce: 6 ranks do not divide among 4"),
        ("hierarchical", {"inter": "in_network"}, "hierarchical does not fit all_reduce: in_network needs a switch"),
        ("hierarchical", {"inter": "pairwise"}, "algorithm pairwise has no all_reduce"),
        ("double_ring", {"stride": 3}, "double_ring does not fit reduce_scatter: a stride of 3 does not visit all 6"),
        ("star", {"server": 6}, "star does not fit all_reduce: there is no rank 6 among 6"),
    ],
)
def test_an_algorithm_that_does_not_fit_says_so_by_name(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build(name, "all_reduce", 6, **options)


def test_only_what_needs_a_switch_is_for_simulation_only() -> None:
    for e in registry.list_algorithms():
        assert e.simulation_only == (build(e.name, e.collective, 4).switches > 0)
