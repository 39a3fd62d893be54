"""Kernels on a GPU: N ranks in one process, one stream and one workspace each."""

import random
import threading
import time
from typing import Any

import pytest
import torch

from gpu.world import NEEDS_GPU, World
from unisono.gpu.kernels import GpuCall
from unisono.runtime.reduce import reducer

pytestmark = NEEDS_GPU

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "int32": torch.int32, "int64": torch.int64, "int16": torch.int16, "int8": torch.int8,
}  # fmt: skip
BLOCKS_IN = ("reduce_scatter", "all_to_all", "scatter")
BLOCKS_OUT = ("all_gather", "all_to_all", "gather")
REDUCES = ("all_reduce", "reduce_scatter", "reduce")
worlds: dict[int, World] = {}


def world(n: int) -> World:
    return worlds.get(n) or worlds.setdefault(n, World(n))


def rank_order(xs: list[torch.Tensor], op: str) -> torch.Tensor:
    """What a CPU group gives: the same reducer, on the host."""
    parts = [x.cpu() for x in xs]
    out = torch.empty_like(parts[0])
    reducer(out.dtype, op)(parts, out, len(parts))
    return out.cuda()


def tensors(call: GpuCall, n: int, seed: int, in_place: bool = False) -> tuple[Any, Any, Any]:
    dtype, count = DTYPES[call.dtype], call.count
    chance = torch.Generator(device="cuda").manual_seed(seed)

    def new(blocks: int) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(blocks * count, generator=chance, device="cuda").to(dtype)
        return torch.randint(-90, 90, (blocks * count,), generator=chance, device="cuda").to(dtype)

    xs = [new(n if call.collective in BLOCKS_IN else 1) for _ in range(n)]
    outs = [torch.zeros(count * (n if call.collective in BLOCKS_OUT else 1), dtype=dtype, device="cuda") for _ in xs]
    mine = [slice(rank * count, (rank + 1) * count) for rank in range(n)]
    total = rank_order(xs, call.op) if call.collective in REDUCES else None
    wanted: Any = {
        "all_reduce": lambda: [total] * n,
        "reduce": lambda: [total if rank == call.root else None for rank in range(n)],
        "reduce_scatter": lambda: [total[mine[rank]] for rank in range(n)],  # type: ignore[index]
        "all_gather": lambda: [torch.cat(xs)] * n,
        "all_to_all": lambda: [torch.cat([x[mine[rank]] for x in xs]) for rank in range(n)],
        "broadcast": lambda: [xs[call.root].clone()] * n,
        "gather": lambda: [torch.cat(xs) if rank == call.root else None for rank in range(n)],
        "scatter": lambda: [xs[call.root][mine[rank]].clone() for rank in range(n)],
    }[call.collective]()
    if call.collective == "broadcast" or (in_place and call.collective == "all_reduce"):
        outs = xs
    return xs, outs, wanted


def wrong(outs: Any, wanted: Any) -> int:
    return sum(want is not None and not torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))


KINDS = [
    ("all_reduce", "one_shot"), ("all_reduce", "two_phase"), ("all_gather", "direct"), ("reduce_scatter", "direct"),
    ("all_to_all", "direct"), ("broadcast", "star"), ("reduce", "star"), ("reduce", "two_phase"), ("gather", "star"),
    ("scatter", "star"),
]  # fmt: skip
LISTS = [kind for kind in KINDS if kind[0] in ("all_gather", "reduce_scatter", "gather", "scatter")]
COUNTS = (1, 15, 16, 1000, 4096, 33_333, 262_144, 1_048_573)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(("collective", "schedule"), KINDS)
def test_values(collective: str, schedule: str, n: int) -> None:
    reduces, root = collective in REDUCES, n - 1 if collective == "broadcast" else 0
    dtypes = ("bfloat16", "float32", "int64", "float16") if n == 2 else ("bfloat16", "float32")
    for k, count in enumerate(COUNTS if n == 4 else COUNTS[n % 2 :: 3]):
        dtype = dtypes[k % len(dtypes)] if reduces else "int32"
        for in_place in (False, True) if collective == "all_reduce" else (False,):
            call = GpuCall(collective, dtype, count, "SUM" if reduces else "", root, schedule)
            xs, outs, wanted = tensors(call, n, k, in_place)
            world(n).run_whole(call, xs, outs)
            assert world(n).failures() == [""] * n
            assert wrong(outs, wanted) == 0, call


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("collective", "schedule"), LISTS)
def test_lists(collective: str, schedule: str, n: int) -> None:
    """Every block is a tensor of its own, some of which begin anywhere."""
    here, op = world(n), "SUM" if collective in REDUCES else ""
    for k, count in enumerate((1, 1000, 4096, 33_333, 300_000)):
        call = GpuCall(collective, "bfloat16" if op else "int16", count, op, 0, schedule, listed=True)
        xs, outs, wanted = tensors(call, n, k)
        aside = 1 + k % 2 * 7  # elements
        lists = [[[torch.cat([b.new_zeros(aside), b])[aside:] for b in t.split(count)] for t in side]
                 for side in (xs, outs)]  # fmt: skip
        torch.cuda.synchronize()
        launches = [here.kernels[rank].prepare(call, 7, aside == 8) for rank in range(n)]
        places = []
        for rank, (ins, into) in enumerate(zip(*lists, strict=True)):
            many = [collective in ("scatter", "reduce_scatter") and (collective != "scatter" or rank == 0),
                    collective in ("gather", "all_gather") and (collective != "gather" or rank == 0)]  # fmt: skip
            sides = zip((ins, into), many, strict=True)
            places.append([t.data_ptr() for blocks, whole in sides for t in (blocks if whole else blocks[:1])])
        here.run_each([lambda stream, f=f, at=at: f(stream, *at) for f, at in zip(launches, places, strict=True)])
        torch.cuda.synchronize()
        assert here.failures() == [""] * n
        assert wrong([torch.cat(blocks) for blocks in lists[1]], wanted) == 0, call


@pytest.mark.parametrize("op", ["AVG", "PRODUCT", "MIN", "MAX"])
def test_reduce_ops_give_the_bits_of_cpus(op: str) -> None:
    for dtype in ("bfloat16", "float16", "float32", *(() if op == "AVG" else ("float64", "int32", "int64"))):
        for schedule in ("one_shot", "two_phase"):
            call = GpuCall("all_reduce", dtype, 5000, op, 0, schedule)
            xs, outs, wanted = tensors(call, 3, 1)
            if op in ("MIN", "MAX") and DTYPES[dtype].is_floating_point:
                xs[1][17] = float("nan")
                wanted = [rank_order(xs, op)] * 3
            world(3).run_whole(call, xs, outs)
            for out, want in zip(outs, wanted, strict=True):
                assert torch.equal(out.nan_to_num(123.0), want.nan_to_num(123.0)), call


@pytest.mark.parametrize(
    ("collective", "schedule", "n"),
    [("all_reduce", "ring", 4), ("all_reduce", "double_tree", 3), ("all_gather", "bruck", 3), ("gather", "star", 4),
     ("all_reduce", "halving_doubling", 4), ("all_to_all", "bruck", 4), ("scatter", "tree", 4), ("reduce", "tree", 4),
     ("broadcast", "chain", 4), ("reduce_scatter", "ring", 4), ("all_gather", "hierarchical", 4)],
)  # fmt: skip
def test_schedules_by_name(collective: str, schedule: str, n: int) -> None:
    op = "SUM" if collective in REDUCES else ""
    call = GpuCall(collective, "float32" if op else "int32", 10_007, op, 0, schedule)
    xs, outs, wanted = tensors(call, n, 3)
    torch.cuda.synchronize()
    for _ in range(3):
        world(n).run(call, xs, outs)
    torch.cuda.synchronize()
    assert wrong(outs, wanted) == 0


@pytest.mark.parametrize("n", [2, 4])
def test_random_calls_in_a_row_with_random_delays(n: int) -> None:
    chance, here = random.Random(n), World(n)
    kinds = []
    for collective, schedule in KINDS:
        for count in (40, 5000, 70_003):
            op = "SUM" if collective in REDUCES else ""
            kinds.append(GpuCall(collective, "bfloat16" if op else "int16", count, op, 0, schedule))
    made = {call: tensors(call, n, k) for k, call in enumerate(kinds)}
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # loaded before any kernel waits
    for call in kinds:
        here.run(call, *made[call][:2])
    torch.cuda.synchronize()
    checks = []
    for k in range(300):
        call = chance.choice(kinds)
        xs, outs, wanted = tensors(call, n, 1000 + k)
        checks.append((xs, outs, wanted))  # inputs too: kernels on other streams read them for long
        torch.cuda.synchronize() if k % 30 == 0 else None
        for stream in here.streams:
            stream.wait_stream(torch.cuda.current_stream())
        here.run(call, xs, outs, delays=[chance.choice((0, 0, 1000, 200_000)) for _ in range(n)])
    torch.cuda.synchronize()
    assert here.failures() == [""] * n
    assert sum(wrong(outs, wanted) for _, outs, wanted in checks) == 0


def test_graphs_replay() -> None:
    n, here = 4, World(4)
    call = GpuCall("all_reduce", "bfloat16", 4096, "SUM", 0, "one_shot")
    xs, outs, wanted = tensors(call, n, 1)
    here.run_whole(call, xs, outs)
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for stream in here.streams:
            stream.wait_stream(main)
        for _ in range(10):
            here.run(call, xs, outs)
        for stream in here.streams:
            main.wait_stream(stream)
    for _ in range(5):
        for out in outs:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert wrong(outs, wanted) == 0


# Failures: a kernel always ends.


@pytest.mark.parametrize("schedule", ["one_shot", "two_phase", "ring"])
def test_other_headers_end_the_kernels_of_all_ranks(schedule: str) -> None:
    here, call = World(4), GpuCall("all_reduce", "float32", 100_000, "SUM", 0, schedule)
    xs, outs, _ = tensors(call, 4, 1)
    here.run_whole(call, xs, outs)
    assert here.failures() == [""] * 4
    begin = time.perf_counter()
    here.run(call, xs, outs, headers=[7, 7, 9, 7])
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 2
    assert all(here.failures())
    assert "mismatch" in here.failures()
    found = here.spaces[0].failure()
    assert found is not None
    if found.kind == "mismatch" and not found.from_peer:
        assert (found.peer, found.came & 0xFFFFFFFF, found.expected & 0xFFFFFFFF) == (2, 9, 7)


def test_an_absent_rank_ends_the_others_at_the_limit() -> None:
    here, call = World(4, limit=0.1), GpuCall("all_reduce", "float32", 5000, "SUM", 0, "one_shot")
    xs, outs, _ = tensors(call, 4, 1)
    here.run_whole(call, xs, outs)
    begin = time.perf_counter()
    here.run(call, xs, outs, absent=[2])
    torch.cuda.synchronize()
    assert 0.09 < time.perf_counter() - begin < 0.5
    assert [bool(kind) for kind in here.failures()] == [True, True, False, True]
    failure = here.spaces[0].failure()
    assert failure is not None
    assert failure.peer == 2
    begin = time.perf_counter()  # what follows does not wait again
    for _ in range(5):
        here.run(call, xs, outs, absent=[2])
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 0.1


def test_the_host_ends_kernels_that_wait() -> None:
    here, call = World(2, limit=100.0), GpuCall("all_reduce", "float32", 5000, "SUM", 0, "one_shot")
    xs, outs, _ = tensors(call, 2, 1)
    here.run_whole(call, xs, outs)
    begin = time.perf_counter()
    threading.Timer(0.2, here.spaces[0].end_kernels).start()
    here.run(call, xs, outs, absent=[1])
    torch.cuda.synchronize()
    assert 0.1 < time.perf_counter() - begin < 1
    assert here.failures() == ["ended by its host", ""]
