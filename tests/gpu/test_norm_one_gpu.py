"""Fused kernels on a GPU: N ranks in one process, one stream and one workspace each."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gpu.test_norm_text import wanted
from gpu.world import NEEDS_GPU, World
from unisono.gpu.norm_kernels import NORMS, NormCall, prepare_norm

pytestmark = NEEDS_GPU

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHORT = {
    "all_reduce_rms_norm": "all_reduce", "reduce_scatter_rms_norm": "reduce_scatter",
    "reduce_scatter_rms_norm_all_gather": "between", "rms_norm_all_gather": "all_gather",
}  # fmt: skip
EPS = 1e-5
worlds: dict[int, World] = {}


def world(n: int) -> World:
    return worlds.get(n) or worlds.setdefault(n, World(n))


class Norms:
    """A call on all ranks: its tensors, the launches, what must come out."""

    def __init__(
        self, here: World, collective: str, dtype: str, rows: int, hidden: int, seed: int, headers: Any = None
    ):
        n, kind = here.n, SHORT[collective]
        chance = torch.Generator(device="cuda").manual_seed(seed)

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance, device="cuda").to(DTYPES[dtype])

        self.here, self.kind = here, kind
        self.xs = [new(rows * (1 if kind in ("all_reduce", "all_gather") else n), hidden) for _ in range(n)]
        self.weight, shared = new(hidden), new(rows, hidden)
        self.residuals = [shared if kind == "all_reduce" else new(rows, hidden) for _ in range(n)]
        whole = rows * (n if kind in ("between", "all_gather") else 1)
        self.outs = [torch.zeros(whole, hidden, dtype=DTYPES[dtype], device="cuda") for _ in self.xs]
        self.carried = [torch.zeros(rows, hidden, dtype=DTYPES[dtype], device="cuda") for _ in self.xs]
        self.wanted = wanted(kind, self.xs, self.residuals, self.weight, rows)
        call = NormCall(collective, dtype, rows, hidden, EPS)
        prepared = here.pool.map(
            lambda rank: prepare_norm(here.kernels[rank], call, headers[rank] if headers else 7, True), range(n)
        )
        self.launches: list[Callable[[int], None]] = []
        for rank, launch in enumerate(prepared):
            assert launch is not None
            tensors = (self.xs[rank], self.residuals[rank], self.weight, self.outs[rank], self.carried[rank])
            self.launches.append(partial(_on, launch, [tensor.data_ptr() for tensor in tensors]))

    def run(self, delays: Any = ()) -> None:
        self.here.run_each(self.launches, delays)

    def wrong(self) -> int:
        """Outputs that differ: residuals in any bit, norms by more than a rounding."""
        found = 0
        near = 1e-5 if self.weight.dtype == torch.float32 else 2**-7
        for out, norm, carried, total in zip(self.outs, self.wanted[0], self.carried, self.wanted[1], strict=True):
            found += not torch.allclose(out.float(), norm.float(), rtol=near, atol=1e-6)
            found += self.kind != "all_gather" and not torch.equal(carried, total)
        return found


def _on(launch: Any, addresses: list[int], stream: int) -> None:
    launch(stream, *addresses)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("collective", NORMS)
def test_values(collective: str, n: int) -> None:
    sizes = [(1, 4096), (8, 8192), (5, 5120), (64, 4096), (200, 96), (7, 100), (3, 1)]
    for k, (rows, hidden) in enumerate(sizes if n == 2 else sizes[n % 2 :: 2]):
        dtype = list(DTYPES)[k % 3]
        if collective == "all_reduce_rms_norm" and rows * hidden > 1 << 18:
            rows = 16
        call = Norms(world(n), collective, dtype, rows, hidden, k)
        torch.cuda.synchronize()
        call.run()
        torch.cuda.synchronize()
        assert world(n).failures() == [""] * n
        assert call.wrong() == 0, (rows, hidden, dtype)


def test_calls_in_a_row_with_random_delays() -> None:
    here, chance = World(4), random.Random(1)
    sizes = [(collective, rows, hidden) for collective in NORMS for rows, hidden in ((1, 4096), (30, 1000))]
    calls = [Norms(here, *sizes[k % len(sizes)][:1], "bfloat16", *sizes[k % len(sizes)][1:], k) for k in range(64)]
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # loaded before any kernel waits
    torch.cuda.synchronize()
    for call in calls:
        call.run([chance.choice((0, 0, 1000, 200_000)) for _ in range(4)])
    torch.cuda.synchronize()
    assert here.failures() == [""] * 4
    assert sum(call.wrong() for call in calls) == 0


def test_graphs_replay() -> None:
    here = World(2)
    call = Norms(here, "all_reduce_rms_norm", "bfloat16", 8, 4096, 3)
    torch.cuda.synchronize()
    call.run()
    torch.cuda.synchronize()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for _ in range(5):
            call.run()
        for stream in here.streams:
            main.wait_stream(stream)
    for _ in range(5):
        for out in call.outs:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert call.wrong() == 0


def test_other_headers_end_the_kernels_of_all_ranks() -> None:
    here = World(3)
    good = Norms(here, "all_reduce_rms_norm", "bfloat16", 8, 4096, 3)
    bad = Norms(here, "all_reduce_rms_norm", "bfloat16", 8, 4096, 3, headers=[7, 9, 7])
    torch.cuda.synchronize()
    good.run()
    torch.cuda.synchronize()
    assert here.failures() == [""] * 3
    begin = time.perf_counter()
    bad.run()
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 2
    assert all(here.failures())
    assert "mismatch" in here.failures()
