"""The front door: tensors as users have them, errors that name what does not fit, a new algorithm."""

import re
from collections.abc import Callable
from itertools import pairwise
from threading import Event

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.algorithms import build, names, register_algorithm, registry
from unisono.backend.options import algorithm
from unisono.errors import MismatchError, UnisonoError, UsageError
from unisono.runtime.run import run, run_over
from unisono.schedule import COLLECTIVES, Collective, Schedule, Step, Transfer
from unisono.schedule.collectives import ROOTED
from unisono.transport.loopback import Loopback, run_loopback
from unisono.verification import verify

Tensors = list[torch.Tensor]


def test_a_new_algorithm_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @register_algorithm("relay_for_tests", "broadcast", steps="n-1", nbytes_per_rank="1")
    def relay(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
        """Each rank hands the whole to the next."""
        ranks = [(root + i) % world_size for i in range(world_size)]
        steps = tuple(Step.of(Transfer(a, b, 0, chunks)) for a, b in pairwise(ranks))
        return Schedule("relay_for_tests", Collective.of("broadcast", world_size, chunks, root), steps)

    assert "relay_for_tests" in names("broadcast")
    schedule = build("relay_for_tests", "broadcast", 4, root=2, chunks=3)
    assert verify(schedule).ok

    def main(transport: Loopback) -> list[float]:
        x = torch.arange(7.0) if transport.rank == 2 else torch.zeros(7)
        run_over(schedule, x, transport)
        return x.tolist()

    assert run_loopback(4, main) == [list(range(7))] * 4


def test_shapes_stay_and_results_come_in_place() -> None:
    def main(transport: Loopback) -> None:
        r = transport.rank
        x = torch.full((2, 3), float(r), requires_grad=True)
        place = x.data_ptr()
        run_over(build("ring", "all_reduce", 3), x, transport)
        assert (x.tolist(), x.data_ptr()) == ([[3.0] * 3] * 2, place)
        mine, everybody = torch.full((2, 2), r), torch.zeros(3, 2, 2, dtype=torch.int64)
        run_over(build("bruck", "all_gather", 3), mine, transport, everybody)
        assert everybody[:, 0, 0].tolist() == [0, 1, 2]
        parts = torch.zeros(3, 2, 2, dtype=torch.int64) if r == 1 else None
        run_over(build("tree", "gather", 3, root=1), mine, transport, parts)
        assert parts is None or parts[:, 1, 1].tolist() == [0, 1, 2]
        own = torch.zeros(2)
        run_over(build("grid", "reduce_scatter", 3), torch.arange(6.0) * (r + 1), transport, own)
        assert own.tolist() == [12.0 * r, 12.0 * r + 6]
        run_over(build("bruck", "barrier", 3), None, transport)

    run_loopback(3, main)


def test_reduce_leaves_senders_alone() -> None:
    def main(transport: Loopback) -> list[float]:
        x = torch.full((5,), float(transport.rank))
        run_over(build("tree", "reduce", 4, root=3), x, transport, op="AVG")
        return x.tolist()

    assert run_loopback(4, main) == [[0.0] * 5, [1.0] * 5, [2.0] * 5, [1.5] * 5]


def test_a_barrier_holds_everybody_back() -> None:
    arrived: list[int] = []

    def main(transport: Loopback, name: str) -> int:
        if transport.rank == 2:
            Event().wait(0.05)
        arrived.append(transport.rank)
        run_over(build(name, "barrier", 3), None, transport)
        return len(arrived)

    for name in names("barrier"):
        if name != "in_network":
            arrived.clear()
            assert run_loopback(3, main, name) == [3, 3, 3], name


def wrong(schedule: Schedule, *tensors: object, **options: object) -> Callable[[Loopback], None]:
    return lambda transport: run_over(schedule, tensors[0], transport, *tensors[1:], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (wrong(build("ring", "all_reduce", 3), torch.ones(4)), "ring all_reduce is made for 3 ranks, not for 2"),
        (wrong(build("ring", "all_reduce", 2), torch.ones(4, 4).t()), "not contiguous"),
        (wrong(build("ring", "all_reduce", 2), torch.ones(4), torch.ones(3)), "output .* 3 elements, expected 4"),
        (wrong(build("ring", "reduce_scatter", 2), torch.ones(5), torch.ones(2)), "has 5 elements, not 2 equal blocks"),
        (wrong(build("ring", "all_gather", 2), torch.ones(2)), "needs its output, got None"),
        (wrong(build("ring", "all_reduce", 2), torch.ones(4), op="BOR"), "BOR is not defined for float32"),
    ],
)
def test_says_what_does_not_fit(call: Callable[[Loopback], None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_loopback(2, call)


def test_an_algorithm_that_does_not_fit_is_named() -> None:
    with pytest.raises(UsageError, match="in_network all_reduce needs a switch that sums"):
        run(build("in_network", "all_reduce", 2), [torch.ones(4)] * 2)
    with pytest.raises(UsageError, match="algorithm bruck has no broadcast"):
        build("bruck", "broadcast", 4)
    with pytest.raises(UsageError, match="ring all_reduce has no option"):
        build("ring", "all_reduce", 4, rows=2)
    assert build("ring", "all_reduce", 4) is build("ring", "all_reduce", 4)


def by_hand(collective: str, given: Tensors, root: int) -> list[torch.Tensor | None]:
    """What every rank ends up with, by arithmetic on all ranks' tensors."""
    n, total = len(given), torch.stack(given).sum(0)
    blocks = [list(x.chunk(n)) for x in given]
    nothing: list[torch.Tensor | None] = [None] * n
    results: dict[str, Callable[[], list[torch.Tensor | None]]] = {
        "all_reduce": lambda: [total] * n,
        "reduce": lambda: [*nothing[:root], total, *nothing[root + 1 :]],
        "broadcast": lambda: [given[root]] * n,
        "reduce_scatter": lambda: list(total.chunk(n)),
        "scatter": lambda: list(blocks[root]),
        "all_gather": lambda: [torch.cat(given)] * n,
        "gather": lambda: [*nothing[:root], torch.cat(given), *nothing[root + 1 :]],
        "all_to_all": lambda: [torch.cat([blocks[src][dst] for src in range(n)]) for dst in range(n)],
        "barrier": lambda: nothing,
    }
    return results[collective]()


CASES = [(names(c)[0], c, n, n - 1 if c in ROOTED else 0) for c in COLLECTIVES for n in (1, 3, 4)]


def inputs(n: int) -> Tensors:
    numbers = torch.Generator().manual_seed(n)
    return [torch.randint(-9, 9, (2 * n, 5), generator=numbers).to(torch.float64) for _ in range(n)]


@pytest.mark.parametrize(("name", "collective", "n", "root"), CASES)
def test_the_verb_runs_threads_where_there_is_no_group(name: str, collective: str, n: int, root: int) -> None:
    given = inputs(n)
    kept = [x.clone() for x in given]
    found = run(build(name, collective, n, root), None if collective == "barrier" else given)
    expected = by_hand(collective, given, root)
    assert isinstance(found, list)
    for mine, right in zip(found, expected, strict=True):
        assert (mine is None) == (right is None)
        assert mine is None or torch.equal(mine, right)
    assert all(map(torch.equal, given, kept))


def in_a_group(rank: int, n: int, cases: list[tuple[str, str, int, int]]) -> list[tuple[str, str]]:
    """What differs from the same by hand, in the default group."""
    wrong = []
    for name, collective, size, root in cases:
        if size == n:
            given = inputs(n)
            found = run(build(name, collective, n, root), None if collective == "barrier" else given[rank])
            right = by_hand(collective, given, root)[rank]
            if (found is None) != (right is None) or (right is not None and not torch.equal(found, right)):
                wrong.append((name, collective))
    x = torch.full((3,), float(rank))
    run(build("ring", "all_reduce", n), x, x)
    mine = dist.new_group([0, n - 1])
    if rank in (0, n - 1):
        together = run(build("one_shot", "all_reduce", 2), x, group=mine, op="AVG")
        assert torch.equal(together, x)
    return wrong if torch.equal(x, torch.full((3,), n * (n - 1) / 2)) else [*wrong, ("ring", "in place")]


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_the_verb_runs_over_a_process_group(backend: str) -> None:
    assert ranks(3, backend=backend).run(in_a_group, CASES) == [[]] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run(build("ring", "all_reduce", 3), torch.ones(4)), "needs a list of 3 as its tensor: one tensor per"),
        (lambda: run(build("ring", "all_reduce", 3), [torch.ones(4)] * 2), "runs in 3 threads and needs a list of 3"),
        (lambda: run(build("ring", "all_reduce", 2), [torch.ones(4), None]), "rank 1 needs one tensor, got NoneType"),
        (lambda: run(build("ring", "reduce_scatter", 2), [torch.ones(5)] * 2), "cuts the first dimension in 2"),
        (lambda: run(build("1f1b", "pipeline", 2), []), "1f1b is of a pipeline, which runs a model"),
        (lambda: run("ring", [torch.ones(4)]), r"run takes a schedule, got 'ring': build it first"),  # type: ignore[arg-type]
        (lambda: run(build("ring", "reduce_scatter", 1), [torch.tensor(1.0)]), r"cuts the first dimension in 1.*\[\]"),
        (
            lambda: run(build("ring", "all_reduce", 2), [torch.ones(3)] * 2, [torch.ones(3), torch.ones(3).int()]),
            r"output of rank 1 are float32 on cpu and int32 on cpu: give one dtype.*\(refused by rank 1\)$",
        ),
        (
            lambda: run(build("ring", "all_reduce", 2), [torch.ones(3)] * 2, [[torch.ones(3)]] * 2),  # type: ignore[list-item]
            "needs one tensor as its output, got list .*; rank 1 too",
        ),
        (
            lambda: run(build("ring", "all_reduce", 2), [torch.eye(2).to_sparse()] * 2),
            "^RuntimeError: unsupported memory format",
        ),
        (
            lambda: run(build("ring", "all_reduce", 2), [torch.ones(3)] * 2, op=dist.ReduceOp.BOR),
            "BOR is not defined for float32",
        ),
    ],
)
def test_the_verb_says_what_does_not_fit(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("1>0 c0 =", "step 0 of wrong sends chunk 0 at rank 1, which holds nothing of it: verify"),
        ("0>1 c0 +", "step 0 of wrong reduces into chunk 0 at rank 1, which holds nothing of it: verify"),
        ("0>5 c0 =", "step 0 of wrong names ranks or chunks that do not exist: verify"),
    ],
)
def test_what_no_rank_holds_is_not_moved(step: str, words: str) -> None:
    schedule = Schedule.from_text(f"schedule wrong broadcast ranks=2 chunks=1 root=0\nstep 0: {step}")
    assert not verify(schedule)
    with pytest.raises(UsageError, match=f"^{words}"):
        run(schedule, [torch.ones(2)] * 2)


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_torchs_reduce_ops_serve_as_well_as_their_names(op: str) -> None:
    given = inputs(3)
    by_torch = {"SUM": "sum", "PRODUCT": "prod", "MIN": "amin", "MAX": "amax"}[op]
    expected = getattr(torch.stack(given), by_torch)(0)
    for spelt in (op, getattr(dist.ReduceOp, op), dist.ReduceOp(getattr(dist.ReduceOp, op))):
        found = run(build("ring", "all_reduce", 3), given, op=spelt)
        assert isinstance(found, list)
        assert all(torch.equal(x, expected) for x in found)


def test_a_factor_is_that_of_torchs_op() -> None:
    found = run(build("ring", "all_reduce", 2), [torch.ones(2)] * 2, op=dist._make_nccl_premul_sum(3.0))
    assert isinstance(found, list)
    assert [x.tolist() for x in found] == [[6.0, 6.0]] * 2


RING = build("ring", "all_reduce", 2)
SCATTER = build("ring", "reduce_scatter", 2)
DIFFERENT: list[tuple[list[Schedule], Tensors, list[str], str]] = [
    ([SCATTER] * 2, [torch.ones(4), torch.ones(5)], ["SUM"] * 2, r"Usage.*which \[5\] does.*\(refused by rank 1\)$"),
    ([RING] * 2, [torch.ones(3), torch.ones(4)], ["SUM"] * 2, r"in tensor: rank 0: float32 \[3\]; rank 1: .* \[4\]; "),
    (
        [RING] * 2,
        [torch.ones(4), torch.ones(4).int()],
        ["SUM"] * 2,
        r"rank 0: float32 \[4\]; rank 1: int32 \[4\]; ",
    ),
    ([RING] * 2, [torch.ones(4), torch.ones(2, 2)], ["SUM"] * 2, r"rank 1: float32 \[2, 2\]; nothing was moved"),
    ([RING] * 2, [torch.ones(4)] * 2, ["SUM", "MAX"], "in op: rank 0: SUM; rank 1: MAX; .*one reduce op"),
    (
        [RING, build("tree", "all_reduce", 2)],
        [torch.ones(4)] * 2,
        ["SUM"] * 2,
        "rank 0: ring .*; rank 1: tree",
    ),
    ([RING, build("ring", "all_reduce", 3)], [torch.ones(4)] * 2, ["SUM"] * 2, "made for 3 ranks, not for 2 .*rank 1"),
]


@pytest.mark.parametrize(("tensors", "words"), [(tensors, words) for _, tensors, _, words in DIFFERENT[1:4]])
def test_threads_are_compared_before_they_start(tensors: Tensors, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        run(RING, tensors)


def differ(rank: int, world_size: int) -> list[tuple[str, list[float]]]:
    """What each call says, and what the next one gives."""
    told = []
    for schedules, tensors, ops, _ in DIFFERENT:
        with pytest.raises(UnisonoError) as refused:
            run(schedules[rank], tensors[rank], op=ops[rank])
        right = run(RING, torch.arange(4.0) + 10 * rank)
        assert isinstance(right, torch.Tensor)
        told.append((f"{refused.type.__name__}: {refused.value}", right.tolist()))
    return told


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_all_ranks_refuse_what_differs_and_the_next_call_is_right(backend: str) -> None:
    first, second = ranks(2, backend=backend).run(differ)
    assert first == second
    for (words, after), (*_, expected) in zip(first, DIFFERENT, strict=True):
        assert re.search(expected, words), words
        assert "\n" not in words
        assert after == [10.0, 12.0, 14.0, 16.0]


def within_a_block(rank: int, world_size: int) -> list[float]:
    with algorithm("tree"):  # which has no all_gather
        found = run(RING, torch.ones(2))
    assert isinstance(found, torch.Tensor)
    return found.tolist()


def test_the_algorithm_of_a_block_is_not_that_of_the_comparison() -> None:
    assert ranks(2).run(within_a_block) == [[2.0, 2.0]] * 2
