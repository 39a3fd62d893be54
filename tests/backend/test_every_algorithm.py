"""Every algorithm of every collective by torch's own calls: uneven, empty, large, in rank order, in the background."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import ranks
from runtime.cases import Case, Tensors, every_case, given, problems, same
from unisono.errors import MismatchError
from unisono.schedule import Schedule

VARIANTS = [
    {"numel": 13},
    {"numel": 3, "uneven": True},
    {"numel": 0},
    {"numel": 5, "deterministic": True, "dtype": torch.bfloat16},
]
LARGE = [{"numel": 300_000}]  # longer than a staging area, whatever the algorithm


def one_call(case: Case, _: Schedule, sources: Tensors, results: Tensors) -> None:
    """The case's collective, from its sources into its results, as torch has it."""
    n, root, op = case.world_size, case.root, getattr(dist.ReduceOp, case.op)
    at_root = dist.get_rank() == root
    with unisono.algorithm(case.algorithm, deterministic=case.deterministic):
        match case.collective:
            case "all_reduce":
                results[0].copy_(sources[0])
                dist.all_reduce(results[0], op)
            case "reduce":
                whole = results[0].copy_(sources[0]) if at_root else sources[0]
                dist.reduce(whole, root, op)
            case "broadcast":
                if at_root:
                    results[0].copy_(sources[0])
                dist.broadcast(results[0], root)
            case "reduce_scatter":
                dist.reduce_scatter(results[0], sources, op)
            case "all_gather":
                dist.all_gather(results, sources[0])
            case "gather":
                dist.gather(sources[0], results if at_root else None, root)
            case "scatter":
                dist.scatter(results[0], sources if at_root else None, root)
            case "all_to_all":
                dist.all_to_all(results, sources)
            case "barrier":
                assert len(sources) <= n
                dist.barrier()


BY_TURNS = (5, 8)  # ranks, each for half of the cases


def everything(rank: int, world_size: int, variants: list[dict[str, object]]) -> list[str]:
    cases = list(every_case(world_size, variants))
    if world_size in BY_TURNS:
        cases = cases[BY_TURNS.index(world_size) :: len(BY_TURNS)]
    return [line[:400] for case in cases for line in problems(case, rank, one_call)]


@pytest.mark.parametrize("world_size", [2, 3, 4, *BY_TURNS])
def test_gives_the_references_values(world_size: int) -> None:
    assert list(chain(*ranks(world_size).run(everything, VARIANTS))) == []


def test_large_data_is_walked_in_pieces() -> None:
    assert list(chain(*ranks(3).run(everything, LARGE))) == []


def in_rank_order(rank: int, world_size: int) -> list[str]:
    """Algorithms that, told to be deterministic, give other bits than the path that is taken without a name."""
    wrong = []
    for i, case in enumerate(every_case(world_size, [{"exact": False}])):
        if case.collective == "all_reduce":
            dtype = torch.bfloat16 if i % 2 else torch.float32
            for numel in (5001, 400_001) if case.algorithm in ("ring", "two_phase") else (5001,):
                mine = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
                plain = mine.clone()
                dist.all_reduce(plain)
                with unisono.algorithm(case.algorithm, deterministic=True):
                    dist.all_reduce(mine)
                wrong += [] if same(plain, mine) else [f"{case.algorithm} {dtype} {numel}"]
    return wrong


def test_deterministic_schedules_have_the_bits_of_the_default_path() -> None:
    assert list(chain(*ranks(5).run(in_rank_order))) == []


def in_the_background(rank: int, world_size: int) -> list[bool]:
    cases = [Case(a, "all_reduce", world_size, numel=900_000) for a in ("ring", "double_tree", "halving_doubling")]
    kept = []
    for case in cases:
        tensor = given(case, rank)[0]
        with unisono.algorithm(case.algorithm):
            kept.append((dist.all_reduce(tensor, async_op=True), tensor))
    sums = [sum(given(case, r)[0] for r in range(world_size)) for case in cases]
    for work, _ in reversed(kept):
        work.wait()
    return [same(tensor, total) for (_, tensor), total in zip(kept, sums, strict=True)]


def test_large_calls_in_the_background_and_in_place() -> None:
    assert ranks(3).run(in_the_background) == [[True] * 3] * 3


def disagreeing(rank: int, world_size: int) -> str:
    tensor = torch.ones(7 if rank else 8)
    try:
        with unisono.algorithm("ring"):
            dist.all_reduce(tensor)
    except MismatchError as error:
        assert (tensor == 1).all()
        return str(error)
    return "nothing was raised"


def test_is_guarded() -> None:
    words = ranks(3).run(disagreeing)
    assert all("disagree" in w and "[8]" in w and "[7]" in w for w in words)
