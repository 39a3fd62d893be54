"""Every dtype and reduce op through schedules, and one order of summation where it is asked for."""

import itertools
from dataclasses import replace
from itertools import chain

import pytest
import torch

from ranks import ranks
from run.cases import FACTOR, REDUCING, SUMS, Case, every_case, given
from run.test_every_algorithm import over
from unisono.errors import UsageError
from unisono.run.arithmetic import arithmetic
from unisono.run.front import named, run
from unisono.run.reduce import reducer
from unisono.run.scheduled import scheduled
from unisono.run.task import Task
from unisono.transport.loopback import Loopback, run_loopback
from unisono.watch.call import Call

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
MOVED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.bool]
ALGORITHMS = ["ring", "recursive_doubling", "double_tree", "one_shot"]


def meaningful(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")
    return op not in (("BAND", "BOR", "BXOR") if dtype.is_floating_point else ("AVG", "PREMUL_SUM"))


def test_every_op_on_every_dtype() -> None:
    kinds = [(d, op) for d, op in itertools.product(FLOATS + COMPLEX + INTS, SUMS) if meaningful(d, op)]
    cases = [
        Case(ALGORITHMS[i % 4], "all_reduce", 4, numel=9, dtype=dtype, op=op, deterministic=bool(i // 4 % 2))
        for i, (dtype, op) in enumerate(kinds)
    ]
    assert list(chain(*run_loopback(4, over, cases))) == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_is_moved() -> None:
    cases = [Case("bruck", "all_to_all", 3, numel=5, dtype=d) for d in FLOATS + COMPLEX + INTS + MOVED]
    cases += [Case("chain", "broadcast", 3, root=1, numel=5, dtype=d) for d in FLOATS + COMPLEX + INTS + MOVED]
    assert list(chain(*run_loopback(3, over, cases))) == []


def summed_floats(transport: Loopback, cases: list[Case]) -> list[list[int]]:
    """The bits of what each rank gets for random floats."""
    found = []
    for case in cases:
        source = given(case, transport.rank)
        result = [torch.empty(len(source[0]), dtype=case.dtype)]
        if case.collective == "reduce" and transport.rank != case.root:
            result = []
        run(case.schedule, source, transport, result, op=case.op, factor=FACTOR, deterministic=case.deterministic)
        found.append([t.view(torch.uint8).tolist() for t in result])
    return found


def in_rank_order(case: Case, block: int) -> list[int]:
    """The bits of ((x0 + x1) + x2) + ..., as the backend's own path sums."""
    parts = [given(case, rank)[block] for rank in range(case.world_size)]
    combine, out = reducer(case.dtype, case.op, FACTOR), torch.empty_like(parts[0])
    combine([combine.prepared(part) for part in parts], out)
    return out.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.float16, "PREMUL_SUM")]
)
def test_deterministic_sums_have_the_bits_of_rank_order(dtype: torch.dtype, op: str) -> None:
    for n in (2, 5, 8):
        variant = {"dtype": dtype, "op": op, "numel": 23, "exact": False, "deterministic": True}
        cases = [case for case in every_case(n, [variant]) if case.collective in REDUCING]
        for rank, found in enumerate(run_loopback(n, summed_floats, cases)):
            for case, bits in zip(cases, found, strict=True):
                if bits:
                    block = rank if case.collective == "reduce_scatter" else 0
                    assert bits[0] == in_rank_order(case, block), (case, rank)


def test_all_ranks_hold_the_same_bits_without_it_too() -> None:
    variant = {"numel": 37, "exact": False}
    for n in (3, 4, 7, 8):
        cases = [case for case in every_case(n, [variant]) if case.collective == "all_reduce"]
        assert len({str(found) for found in run_loopback(n, summed_floats, cases)}) == 1


def test_rounds_once_whatever_the_algorithm() -> None:
    """1 and seven times 2**-9: lost one by one in bfloat16, seen in float32."""

    def sums(transport: Loopback, name: str) -> float:
        x = torch.tensor([1.0 if transport.rank == 0 else 2.0**-9], dtype=torch.bfloat16)
        run(named(name, "all_reduce", 8), x, transport)
        return float(x)

    exact = float(torch.tensor(1 + 7 * 2.0**-9).bfloat16())
    assert exact > 1
    for name in ("ring", "tree", "chain", "halving_doubling"):
        assert run_loopback(8, sums, name) == [exact] * 8


def test_refuses_ops_without_a_meaning() -> None:
    for dtype, op in ((torch.int32, "AVG"), (torch.float32, "BXOR"), (torch.complex64, "MAX"), (torch.float32, "NONE")):
        with pytest.raises(UsageError, match=op):
            arithmetic(dtype, op, 1.0, 4, False)


def over_the_board(rank: int, world_size: int, cases: list[Case]) -> list[list[list[int]]]:
    """For each case, the bits of the backend's own path, and of the schedule with deterministic sums."""
    import torch.distributed as dist

    group, found = dist.distributed_c10d._get_default_group()._group, []
    for case in cases:
        own = given(case, rank)[0]
        result = own.clone()
        dist.all_reduce(own, dist.ReduceOp.SUM)
        call = Call("all_reduce", case.dtype, tuple(result.shape), "SUM", rest=case.algorithm)
        program = scheduled(group.operations.board, case.schedule, [result], [result], op="SUM", deterministic=True)
        group.collectives.submit(Task(call, program, [], 20.0), False)
        found.append([t.view(torch.uint8).tolist() for t in (own, result)])
    return found


def test_deterministic_schedules_have_the_bits_of_the_backends_own_path() -> None:
    cases = [c for c in every_case(5, [{"numel": 5001, "exact": False}]) if c.collective == "all_reduce"]
    cases = [replace(case, dtype=torch.bfloat16 if i % 2 else torch.float32) for i, case in enumerate(cases)]
    cases += [replace(case, numel=400_001) for case in cases if case.algorithm in ("ring", "two_phase")]  # in pieces
    for found in ranks(5).run(over_the_board, cases):
        for case, (own, result) in zip(cases, found, strict=True):
            assert own == result, case
