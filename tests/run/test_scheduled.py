"""Schedules inside the backend: every algorithm over the board of a real group, guarded and asynchronous."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from run.cases import FACTOR, REDUCING, Case, Tensors, every_case, given, problems, same
from unisono.errors import MismatchError, UsageError
from unisono.run.front import named
from unisono.run.record import Record, merged
from unisono.run.scheduled import scheduled, told_sizes
from unisono.run.task import Task
from unisono.schedule import Schedule
from unisono.watch.call import Call, piece

VARIANTS = [
    {"numel": 13},
    {"numel": 3, "uneven": True, "chunks": 4},
    {"numel": 0},
    {"numel": 5, "deterministic": True, "dtype": torch.bfloat16},
]
LARGE = [{"numel": 300_000}]  # longer than a staging area, whatever the algorithm


def the_group():
    return dist.distributed_c10d._get_default_group()._group


def call_of(case: Case, rank: int) -> Call:
    """The call's header; where sizes differ by rank it tells them, as the backend's do."""
    n, sizes = case.world_size, case.sizes
    op = case.op if case.collective in REDUCING else ""
    if case.collective in ("all_gather", "gather", "scatter", "all_to_all"):

        def between(a: int, b: int) -> int:
            match case.collective:
                case "all_gather":
                    return piece((sizes[a],))
                case "gather":
                    return piece((sizes[a],)) if b == case.root else 0
                case "scatter":
                    return piece((sizes[b],)) if a == case.root else 0
            return piece((sizes[a * n + b],))

        sends, expects = [between(rank, b) for b in range(n)], [between(a, rank) for a in range(n)]
        return Call(case.collective, case.dtype, sends=tuple(sends), expects=tuple(expects), words=case.algorithm)
    return Call(case.collective, case.dtype, tuple(sizes), op, rest=case.algorithm)


def carry_out(case: Case, schedule: Schedule, sources: Tensors, results: Tensors, record: Record | None = None) -> Task:
    group = the_group()
    board, call = group.operations.board, call_of(case, group.rank)
    sizes = case.sizes
    if call.sends:  # only moved: as bytes, sizes by header
        sources, results = ([t.view(torch.uint8) for t in tensors] for tensors in (sources, results))
        sizes = told_sizes(board, call, schedule, torch.uint8)
    op = case.op if case.collective in REDUCING else ""
    program = scheduled(
        board,
        schedule,
        sources,
        results,
        op=op,
        factor=FACTOR,
        sizes=sizes,
        deterministic=case.deterministic,
        record=record,
    )
    return Task(call, program, [], 20.0)


def everything(rank: int, world_size: int, variants: list[dict[str, object]]) -> list[str]:
    def one(case: Case, schedule: Schedule, sources: Tensors, results: Tensors) -> None:
        the_group().collectives.submit(carry_out(case, schedule, sources, results), False)

    return [line[:400] for case in every_case(world_size, variants) for line in problems(case, rank, one)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_algorithm_over_the_board(world_size: int) -> None:
    assert list(chain(*ranks(world_size).run(everything, VARIANTS))) == []


def test_large_data_is_walked_in_pieces() -> None:
    assert list(chain(*ranks(3).run(everything, LARGE))) == []


def in_the_background(rank: int, world_size: int) -> list[bool]:
    cases = [Case(a, "all_reduce", world_size, numel=900_000) for a in ("ring", "double_tree", "halving_doubling")]
    lane, kept = the_group().collectives, []
    for case in cases:
        tensor = given(case, rank)[0]
        task = carry_out(case, case.schedule, [tensor], [tensor])
        lane.submit(task, True)
        kept.append((task, tensor))
    sums = [sum(given(case, r)[0] for r in range(world_size)) for case in cases]
    for task, _ in reversed(kept):
        lane.finish(task)
    return [same(tensor, total) for (_, tensor), total in zip(kept, sums, strict=True)]


def test_large_calls_in_the_background_and_in_place() -> None:
    assert ranks(3).run(in_the_background) == [[True] * 3] * 3


def disagreeing(rank: int, world_size: int) -> str:
    case = Case("ring", "all_reduce", world_size, numel=7 if rank else 8)
    tensor = given(case, rank)[0]
    kept = tensor.clone()
    try:
        the_group().collectives.submit(carry_out(case, case.schedule, [tensor], [tensor]), False)
    except MismatchError as error:
        assert same(kept, tensor)
        return str(error)
    return "nothing was raised"


def test_is_guarded() -> None:
    words = ranks(3).run(disagreeing)
    assert all("disagree" in w and "[8]" in w and "[7]" in w for w in words)


def recorded(rank: int, world_size: int) -> Record:
    case, record = Case("ring", "all_reduce", world_size, numel=12), Record()
    tensor = given(case, rank)[0]
    the_group().collectives.submit(carry_out(case, case.schedule, [tensor], [tensor], record), False)
    return record


def test_tells_what_lands_when() -> None:
    events = merged(ranks(3).run(recorded))
    told = list(
        zip(*(a.tolist() for a in (events.step, events.src, events.dst, events.chunk, events.reduce)), strict=True)
    )
    schedule = named("ring", "all_reduce", 3)
    drawn = [(i, t.src, t.dst, t.chunk, t.reduce) for i, s in enumerate(schedule.explicit_steps()) for t in s]
    assert sorted(told) == sorted(drawn)
    assert (events.nbytes == 16).all()
    assert (events.end >= events.start).all()


def refusing(rank: int, world_size: int) -> list[str]:
    board, x = the_group().operations.board, torch.zeros(4)
    wrong = [
        lambda: scheduled(board, named("ring", "all_reduce", world_size + 1), [x], [x], op="SUM"),
        lambda: scheduled(board, named("ring", "all_reduce", world_size), [x], [x, x], op="SUM"),
        lambda: scheduled(board, named("ring", "all_reduce", world_size), [x], [x], op="BAND"),
        lambda: scheduled(board, named("ring", "all_reduce", world_size, chunks=20_000), [x], [x], op="SUM"),
    ]
    words = []
    for call in wrong:
        with pytest.raises(UsageError) as caught:
            call()
        words.append(str(caught.value))
    return words


def test_refuses_what_does_not_fit_by_name() -> None:
    world, results, op, chunks = ranks(2).run(refusing)[0]
    assert "ring all_reduce is made for 3 ranks" in world
    assert "rank 0 has 1 results, got 2" in results
    assert "BAND is not defined for float32" in op
    assert "20000 chunks in one step" in chunks
