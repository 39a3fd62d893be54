"""Random schedules: the same bits by compiled loops, by torch's operations, by both in one group, and over messages.

They are registered ones with any root and number of pieces, two after each other, one backwards, or random trees, a
tree for each chunk; whether a schedule is right is `verify`'s to say.
"""

import hashlib
import os
from functools import cache
from itertools import chain
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import given as drawn_from
from hypothesis import strategies as st

import unisono
from ranks import ranks
from runtime.cases import REDUCING, Case, Tensors, expected, given, joined
from unisono.algorithms import AlgorithmInfo, build, list_algorithms, register_algorithm, registry
from unisono.errors import UsageError
from unisono.runtime.run import run_over
from unisono.schedule import Collective, Schedule, Step, Transfer
from unisono.schedule.collectives import COMPOSITIONS, REVERSES, ROOTED
from unisono.torch_names import all_gather_single, reduce_scatter_single
from unisono.transport.loopback import Loopback, run_loopback
from unisono.verification import verify

COLLECTIVES = sorted({e.collective for e in list_algorithms()} - {"barrier"})
WHOLE = ("all_reduce", "broadcast", "reduce")
MODES = (["now"], ["0"], ["now", "0"])


class Line(NamedTuple):
    """A schedule as text, under a name of its own, what goes through it, and whether on tensors that are shared."""

    text: str
    case: Case
    shared: bool


@cache
def fitting(collective: str, world_size: int) -> list[AlgorithmInfo]:
    """The registered algorithms that so many ranks can run."""
    found = []
    for e in list_algorithms():
        if e.collective == collective and not e.simulation_only:
            try:
                build(e.name, e.collective, world_size)
            except UsageError:
                continue
            found.append(e)
    return found


def registered(draw: st.DrawFn, collective: str, n: int, root: int, pieces: int) -> Schedule:
    """Any algorithm for a collective; ``pieces`` per rank, so that two fit each other."""
    found = fitting(collective, n)
    assume(found)
    e = draw(st.sampled_from(found))
    chunks = pieces * n if collective in WHOLE else pieces
    return build(e.name, collective, n, root if e.rooted else 0, chunks)


def trees(draw: st.DrawFn, n: int, root: int, chunks: int) -> Schedule:
    """A broadcast by a tree for each chunk: ranks get it from one of those before them in a random order."""
    steps: dict[int, list[Transfer]] = {}
    for chunk in range(chunks):
        order = [root, *draw(st.permutations([rank for rank in range(n) if rank != root]))]
        depth = {root: 0}
        for place, rank in enumerate(order[1:], 1):
            parent = order[draw(st.integers(0, place - 1))]
            depth[rank] = depth[parent] + 1
            steps.setdefault(depth[parent], []).append(Transfer(parent, rank, chunk))
    return Schedule("trees", Collective("broadcast", n, chunks, root), tuple(Step.of(*steps[k]) for k in sorted(steps)))


@st.composite
def schedules(draw: st.DrawFn, n: int, collective: str) -> Schedule:
    root, pieces = draw(st.integers(0, n - 1)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["registered", "composed", "backwards", "trees"]))
    if kind == "trees" and collective in WHOLE:
        down = trees(draw, n, root, draw(st.integers(1, 5)))
        if collective == "broadcast":
            return down
        up = trees(draw, n, root, down.collective.num_chunks).reversed()
        return up if collective == "reduce" else up.then(down)
    pairs = [pair for pair, whole in COMPOSITIONS.items() if whole == collective]
    if kind == "composed" and pairs:
        first, second = draw(st.sampled_from(pairs))
        one, other = registered(draw, first, n, root, pieces), registered(draw, second, n, root, pieces)
        assume(one.collective.num_chunks == other.collective.num_chunks)  # some cut pieces further
        return one.then(other)
    forwards = [a for a, b in REVERSES.items() if b == collective]
    if kind == "backwards" and forwards:
        found = registered(draw, forwards[0], n, root, pieces).reversed()
        assume(verify(found).ok)  # not where a chunk comes to a rank twice
        return found
    return registered(draw, collective, n, root, pieces)


@st.composite
def lines(draw: st.DrawFn, n: int, collective: str) -> Line:
    schedule = draw(schedules(n, collective))
    assert verify(schedule).ok, schedule.to_text()
    c = schedule.collective
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    op = draw(st.sampled_from(["SUM", "MAX", "AVG"] if dtype.is_floating_point else ["SUM", "MIN", "AVG"]))
    deterministic = c.reduces and draw(st.booleans())
    numel = draw(st.sampled_from([1, 7, 1000, 5003, 60_000 // n, 400_000 // n]))
    text = schedule.to_text().partition(" ")[2].partition(" ")[2]
    name = "drawn_" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    case = Case(
        name, c.name, n, c.root, 1, numel, dtype, op, deterministic=deterministic, exact=not dtype.is_floating_point
    )
    return Line(f"schedule {name} {text}", case, draw(st.booleans()))


def digest(tensors: Tensors) -> str:
    return hashlib.blake2b(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def over_messages(transport: Loopback, plan: tuple[Line, ...]) -> list[str]:
    """Digests of what a rank gets over a transport, in rank order where anything is summed."""
    found = []
    for text, case, _ in plan:
        got = joined([torch.empty_like(t) for t in expected(case, transport.rank)])
        source, exact = joined(given(case, transport.rank)), case.collective in REDUCING
        run_over(Schedule.from_text(text), source, transport, got, op=case.op, deterministic=exact)
        found.append(digest([] if got is None else [got]))
    return found


def make(text: str, rooted: bool) -> str:
    """Registers a schedule as an algorithm; its name."""
    schedule = Schedule.from_text(text)

    def with_root(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
        """Drawn."""
        assert (world_size, root) == (schedule.world_size, schedule.collective.root)
        return schedule

    def without(world_size: int, chunks: int = 1) -> Schedule:
        """Drawn."""
        return schedule

    builder = with_root if rooted else without
    register_algorithm(schedule.name, schedule.collective.name, steps="1", nbytes_per_rank="1")(builder)
    return schedule.name


def call(case: Case, rank: int, shared: bool, group: dist.ProcessGroup, async_op: bool) -> Tensors:
    """One call by torch's functions; what this rank must have of it."""

    def copied(tensors: Tensors) -> Tensors:
        make = unisono.empty if shared else torch.empty
        return [make(t.shape, dtype=t.dtype).copy_(t) for t in tensors]

    sources, shapes, root = given(case, rank), expected(case, rank), case.root
    results, op = copied([torch.zeros_like(t) for t in shapes]), getattr(dist.ReduceOp, case.op)
    how = {"group": group, "async_op": async_op}
    rooted = {"group_src" if case.collective in ("broadcast", "scatter") else "group_dst": root, **how}
    source = copied([torch.cat(sources)])[0] if sources else None
    match case.collective:
        case "all_reduce" | "reduce" | "broadcast":
            x = source if source is not None else results[0]
            if case.collective == "all_reduce":
                work = dist.all_reduce(x, op, **how)
            elif case.collective == "reduce":
                work = dist.reduce(x, op=op, **rooted)
            else:
                work = dist.broadcast(x, **rooted)
            results = [x] if results else []
        case "reduce_scatter":
            work = reduce_scatter_single(results[0], source, op, **how)
        case "gather":
            work = dist.gather(source, results or None, **rooted)
        case "scatter":
            work = dist.scatter(results[0], copied(sources) or None, **rooted)
        case _:
            whole = copied([torch.cat(results)])[0]
            move = all_gather_single if case.collective == "all_gather" else dist.all_to_all_single
            work = move(whole, source, **how)
            results = list(whole.view(len(results), -1))
    if work is not None:
        work.wait()
    return results


def alike(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether it is the value, as near as the dtype's rounding lets it be."""
    if not result.dtype.is_floating_point:
        return torch.equal(result, wanted)
    rtol = 2e-2 if result.dtype is torch.bfloat16 else 1e-5
    return torch.allclose(result.double(), wanted.double(), rtol=rtol, atol=rtol)


def on_the_board(rank: int, world_size: int, plan: tuple[Line, ...]) -> tuple[list[list[str]], list[str]]:
    """Digests of every line, by each set of interpreters; what is no value that it may be."""
    kept, usual = dict(registry._registered), os.environ["UNISONO_FUSED"]
    groups, found, wrong = [], [], []
    try:
        for modes in MODES:
            os.environ["UNISONO_FUSED"] = modes[rank % len(modes)]
            groups.append(dist.new_group())
            dist.barrier(groups[-1])
        os.environ["UNISONO_FUSED"] = usual
        for k, (text, case, shared) in enumerate(plan):
            name, by = make(text, case.collective in ROOTED), []
            for group in groups:
                with unisono.algorithm(name, deterministic=case.deterministic):
                    for again in range(1 + shared):  # which goes directly, if it does, the second time
                        results = call(case, rank, shared, group, (k + again) % 2 == 1)
                by.append(digest(results))
            for result, want in zip(results, expected(case, rank), strict=True):
                wrong += [] if alike(result, want) else [f"{case}: {result} instead of {want}, by {text}"]
            found.append(by)
    finally:
        os.environ["UNISONO_FUSED"] = usual
        registry._registered.clear()
        registry._registered.update(kept)
        for group in groups:
            dist.destroy_process_group(group)
    return found, wrong


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_bits_everywhere(world_size: int, examples: int) -> None:
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @drawn_from(st.tuples(*(lines(world_size, collective) for collective in 2 * COLLECTIVES)))
    def check(plan: tuple[Line, ...]) -> None:
        messages = run_loopback(world_size, over_messages, plan)
        board = ranks(world_size).run(on_the_board, plan)
        assert list(chain(*(wrong for _, wrong in board))) == []
        for rank, (found, _) in enumerate(board):
            for line, by, sent in zip(plan, found, messages[rank], strict=True):
                case = line.case
                same = case.deterministic or case.collective not in REDUCING or not case.dtype.is_floating_point
                assert {*by, sent if same else by[0]} == {by[0]}, (
                    f"rank {rank}, {case}, shared {line.shared}: {line.text}"
                )

    check()
