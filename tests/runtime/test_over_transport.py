"""The interpreter of messages: what travels, in which dtype and from where; every dtype and op; orders of summation."""

import itertools
from collections.abc import Sequence
from itertools import chain

import pytest
import torch

from runtime.cases import FACTOR, REDUCING, SUMS, Case, every_case, given, joined
from runtime.test_every_algorithm import over
from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.program import Program, lower
from unisono.runtime.over_transport import chunk_spans, execute
from unisono.runtime.reduce import reducer
from unisono.runtime.run import run_over
from unisono.schedule import Collective, Schedule, Step, Transfer
from unisono.transport.base import Transport, Wait
from unisono.transport.loopback import Loopback, run_loopback

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
MOVED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.bool]
ALGORITHMS = ["ring", "recursive_doubling", "double_tree", "one_shot"]


class Watched(Transport):
    """A loopback that notes what is posted, and asserts that what is sent is left alone until its wait returns."""

    def __init__(self, wire: Loopback) -> None:
        self.wire, self.rank, self.world_size = wire, wire.rank, wire.world_size
        self.sent: list[list[tuple[int, torch.Tensor]]] = []
        self.received: list[list[tuple[int, torch.Tensor]]] = []
        self.waited: list[str] = []

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        assert all(tensor.numel() for _, tensor in (*sends, *receives))
        self.sent.append(list(sends))
        self.received.append(list(receives))
        waits = self.wire.post(sends, receives)
        kinds = ["send"] * len(sends) + ["receive"] * len(receives)
        kept = [tensor.clone() for _, tensor in sends] + [None] * len(receives)
        tensors = [tensor for _, tensor in (*sends, *receives)]
        return [self.waiter(*row) for row in zip(waits, kinds, tensors, kept, strict=True)]

    def waiter(self, wait: Wait, kind: str, tensor: torch.Tensor, kept: torch.Tensor | None) -> Wait:
        def done() -> None:
            assert kept is None or torch.equal(kept, tensor)
            self.waited.append(kind)
            wait()

        return done


def inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


def test_chunks_have_equal_lengths_but_for_the_last_ones() -> None:
    assert chunk_spans(10, 4) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert chunk_spans(3, 5) == [(0, 1), (1, 2), (2, 3), (3, 3), (3, 3)]
    assert chunk_spans(0, 2) == [(0, 0), (0, 0)]


def test_a_message_per_step_and_peer_from_and_to_where_its_chunks_lie() -> None:
    """In halving and doubling a message is a run of chunks: neighbours in the tensor, and among sums in the making."""

    def main(wire: Loopback) -> None:
        transport, x, y = Watched(wire), torch.arange(16.0), torch.zeros(16)
        run_over(build("halving_doubling", "all_reduce", 4), x, transport, y)
        assert y.tolist() == [4.0 * k for k in range(16)]
        assert [[t.numel() for _, t in step] for step in transport.sent] == [[8], [4], [4], [8]]
        assert inside(transport.sent[0][0][1], x)
        assert inside(transport.sent[2][0][1], y)
        assert not any(inside(t, x) for step in transport.received for _, t in step)
        assert transport.waited == ["receive", "send"] * 4
        blocks, all_blocks = torch.full((3,), 1.0 + wire.rank), torch.zeros(4, 3)
        gathering = Watched(wire)
        run_over(build("ring", "all_gather", 4), blocks, gathering, all_blocks)
        assert all_blocks[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert all(inside(t, all_blocks) for step in gathering.received for _, t in step)
        assert all(inside(t, all_blocks) for step in gathering.sent[1:] for _, t in step)

    run_loopback(4, main)


def test_chunks_that_lie_apart_are_packed() -> None:
    step = Step.of(Transfer(0, 1, 0), Transfer(0, 1, 2, 2), Transfer(0, 1, 5))
    rest = Step.of(Transfer(0, 1, 1), Transfer(0, 1, 4))
    schedule = Schedule("by_hand", Collective.of("broadcast", 2, 6), (step, rest))

    def main(wire: Loopback) -> list[int]:
        transport = Watched(wire)
        x = torch.arange(11) if wire.rank == 0 else torch.zeros(11, dtype=torch.int64)
        run_over(schedule, x, transport)
        posted = transport.received if wire.rank else transport.sent
        assert [[t.numel() for _, t in step] for step in posted] == [[7], [4]]
        return x.tolist()

    assert run_loopback(2, main) == [list(range(11))] * 2


def test_empty_messages_are_not_posted() -> None:
    def main(wire: Loopback) -> list[int]:
        transport, x = Watched(wire), torch.ones(2)
        run_over(
            build("ring", "all_reduce", 4), x, transport
        )  # two of the four chunks have an element: 2 * 3 hops each
        assert x.tolist() == [4.0, 4.0]
        messages = len([peer for step in transport.sent for peer, _ in step])
        run_over(build("one_shot", "all_reduce", 4), torch.ones(0), transport)
        return [messages, len([peer for step in transport.sent for peer, _ in step])]

    assert sum(first for first, _ in run_loopback(4, main)) == 2 * 2 * 3
    assert all(first == second for first, second in run_loopback(4, main))


@pytest.mark.parametrize(
    ("dtype", "name", "deterministic", "carried"),
    [
        (torch.bfloat16, "ring", False, torch.float32),
        (torch.bfloat16, "chain", False, torch.float32),  # its first rank and its last sum nothing in part themselves
        (torch.bfloat16, "ring", True, torch.bfloat16),
        (torch.bfloat16, "two_phase", False, torch.bfloat16),
        (torch.float32, "ring", False, torch.float32),
    ],
)
def test_accumulators_travel_where_partial_sums_do(
    dtype: torch.dtype, name: str, deterministic: bool, carried: torch.dtype
) -> None:
    def main(wire: Loopback) -> set[torch.dtype]:
        transport, x = Watched(wire), torch.ones(8, dtype=dtype)
        run_over(build(name, "all_reduce", 4), x, transport, deterministic=deterministic)
        assert x.tolist() == [4.0] * 8
        return {t.dtype for step in (*transport.sent, *transport.received) for _, t in step}

    assert run_loopback(4, main) == [{carried}] * 4


def meaningful(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")
    return op not in (("BAND", "BOR", "BXOR") if dtype.is_floating_point else ("PREMUL_SUM",))


def test_every_op_on_every_dtype() -> None:
    kinds = [(d, op) for d, op in itertools.product(FLOATS + COMPLEX + INTS, SUMS) if meaningful(d, op)]
    cases = [
        Case(name, "all_reduce", 4, numel=9, dtype=dtype, op=op, deterministic=bool(i // 4 % 2))
        for i, (dtype, op) in enumerate(kinds)
        for name in (ALGORITHMS[i % 4], *([] if dtype.is_complex else ["chain"]))  # products' zeros have their signs
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
        result = torch.empty(case.numel, dtype=case.dtype)
        options = {"op": case.op, "factor": FACTOR, "deterministic": case.deterministic}
        run_over(case.schedule, joined(given(case, transport.rank)), transport, result, **options)  # type: ignore[arg-type]
        empty = case.collective == "reduce" and transport.rank != case.root
        found.append([] if empty else [result.view(torch.uint8).tolist()])
    return found


def in_rank_order(case: Case, block: int) -> list[int]:
    """The bits of ((x0 + x1) + x2) + ..., as the backend's own path sums."""
    parts = [given(case, rank)[block] for rank in range(case.world_size)]
    combine, out = reducer(case.dtype, case.op, FACTOR), torch.empty_like(parts[0])
    combine([combine.prepared(part) for part in parts], out, case.world_size)
    return out.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.float16, "PREMUL_SUM")]
)
def test_deterministic_sums_have_the_bits_of_rank_order(dtype: torch.dtype, op: str) -> None:
    for n, numel in ((2, 23), (5, 5001), (8, 23)):
        variant = {"dtype": dtype, "op": op, "numel": numel, "exact": False, "deterministic": True}
        cases = [case for case in every_case(n, [variant]) if case.collective in REDUCING]
        for rank, found in enumerate(run_loopback(n, summed_floats, cases)):
            for case, bits in zip(cases, found, strict=True):
                if bits:
                    block = rank if case.collective == "reduce_scatter" else 0
                    assert bits[0] == in_rank_order(case, block), (case, rank)


def test_all_ranks_hold_the_same_bits_without_it_too() -> None:
    for n, dtype in itertools.product((3, 4, 7, 8), (torch.float32, torch.bfloat16)):
        variant = {"numel": 37, "exact": False, "dtype": dtype}
        cases = [case for case in every_case(n, [variant]) if case.collective == "all_reduce"]
        assert len({str(found) for found in run_loopback(n, summed_floats, cases)}) == 1


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_rounds_once_whatever_the_algorithm(op: str) -> None:
    """1 and seven times 2**-9: lost one by one in bfloat16, seen in float32."""

    def sums(transport: Loopback, name: str) -> float:
        x = torch.tensor([1.0 if transport.rank == 0 else 2.0**-9], dtype=torch.bfloat16)
        run_over(build(name, "all_reduce", 8), x, transport, op=op)
        return float(x)

    exact = float(torch.tensor((1 + 7 * 2.0**-9) / (8 if op == "AVG" else 1)).bfloat16())
    assert exact > (0.125 if op == "AVG" else 1)
    for name in ("ring", "tree", "chain", "halving_doubling"):
        assert run_loopback(8, sums, name) == [exact] * 8


def test_large_tensors_in_place() -> None:
    def main(wire: Loopback) -> None:
        for name, dtype, deterministic in itertools.product(
            ("ring", "double_tree", "halving_doubling"), (torch.float32, torch.bfloat16), (False, True)
        ):
            x = torch.full((300_001,), 1.0 + wire.rank, dtype=dtype)
            run_over(build(name, "all_reduce", 3), x, Watched(wire), deterministic=deterministic)
            assert (x == 6).all(), (name, dtype, deterministic)

    run_loopback(3, main)


def test_refuses_ops_without_a_meaning() -> None:
    meaningless = ((torch.bool, "AVG"), (torch.int32, "PREMUL_SUM"), (torch.float32, "BXOR"), (torch.complex64, "MAX"))
    for dtype, op in (*meaningless, (torch.float32, "NONE")):
        x = torch.ones(4, dtype=dtype)
        with pytest.raises(UsageError, match=op):
            run_loopback(2, lambda wire, x=x, op=op: run_over(build("ring", "all_reduce", 2), x.clone(), wire, op=op))


def test_a_program_read_from_its_text_runs_alike() -> None:
    """Nothing that is executed is kept beside the rows."""
    schedule = build("halving_doubling", "all_reduce", 4)

    def main(wire: Loopback) -> list[float]:
        program = Program.from_text(lower(schedule, wire.rank, "messages").to_text())
        x = torch.arange(6.0) + wire.rank
        execute(program, wire, x, x, reducer(x.dtype, "SUM"))
        return x.tolist()

    assert run_loopback(4, main) == [[4.0 * k + 6 for k in range(6)]] * 4
