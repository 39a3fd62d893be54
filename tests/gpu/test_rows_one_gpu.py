"""all_to_all of rows on a GPU: N ranks in one process, one stream and one workspace each; counts are read there."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gpu.test_row_text import wanted
from gpu.world import NEEDS_GPU, World
from unisono.gpu.row_kernels import RowCall, prepare_rows

pytestmark = NEEDS_GPU


class Rows:
    """A call on all ranks. `route` gives it other counts, of which no host code of the call knows."""

    def __init__(self, here: World, width: int, rows: int, capacity: int, headers: Any = None) -> None:
        n = here.n
        self.here, self.capacity = here, capacity
        self.xs = [torch.randint(1, 999, (rows, width), device="cuda").to(torch.int16) for _ in range(n)]
        self.counts = [torch.zeros(n, dtype=torch.int64, device="cuda") for _ in range(n)]
        self.outs = [torch.full((capacity, width), 7, dtype=torch.int16, device="cuda") for _ in range(n)]
        self.received = [torch.full((n,), -1, device="cuda") for _ in range(n)]
        call = RowCall("int16", width, capacity, rows, capacity)
        prepared = here.pool.map(
            lambda rank: prepare_rows(here.kernels[rank], call, headers[rank] if headers else 7, True), range(n)
        )
        self.launches: list[Callable[[int], None]] = []
        for rank, launch in enumerate(prepared):
            assert launch is not None
            tensors = (self.xs[rank], self.counts[rank], self.outs[rank], self.received[rank])
            self.launches.append(partial(_on, launch, [tensor.data_ptr() for tensor in tensors]))

    def route(self, counts: list[list[int]]) -> None:
        for mine, row in zip(self.counts, counts, strict=True):
            mine.copy_(torch.tensor(row))

    def wrong(self) -> int:
        """Outputs that differ from what the counts say."""
        counts = [mine.tolist() for mine in self.counts]
        n = len(counts)
        should = wanted([x.cpu() for x in self.xs], counts, [self.capacity] * n)
        found = sum(not torch.equal(out.cpu(), want) for out, want in zip(self.outs, should, strict=True))
        return found + sum(self.received[r].tolist() != [row[r] for row in counts] for r in range(n))


def _on(launch: Any, addresses: list[int], stream: int) -> None:
    launch(stream, *addresses)


def routes(n: int, most: int, chance: random.Random) -> list[list[int]]:
    return [[chance.choice((0, 1, most // 3, most)) for _ in range(n)] for _ in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values(n: int) -> None:
    here, chance = World(n), random.Random(n)
    for width, rows, capacity, most in [
        (4096, 64, 64, 20),
        (80, 500, 1000, 200),
        (1, 40, 30, 20),
        (7168, 300, 900, 99),
    ]:
        call = Rows(here, width, rows, capacity)
        for _ in range(3):
            call.route(routes(n, most, chance))
            torch.cuda.synchronize()
            here.run_each(call.launches)
            torch.cuda.synchronize()
            assert here.failures() == [""] * n
            assert call.wrong() == 0, (width, rows, capacity)


def test_a_graph_follows_the_counts() -> None:
    here, chance = World(3), random.Random(3)
    call = Rows(here, 512, 100, 200)
    torch.cuda.synchronize()
    here.run_each(call.launches)
    torch.cuda.synchronize()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        here.run_each(call.launches)
        for stream in here.streams:
            main.wait_stream(stream)
    for _ in range(6):
        call.route(routes(3, 60, chance))
        graph.replay()
        torch.cuda.synchronize()
        assert call.wrong() == 0


def test_calls_in_a_row_with_random_delays() -> None:
    here, chance = World(4), random.Random(4)
    calls = [Rows(here, chance.choice((16, 1000)), 60, 200) for _ in range(20)]
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # loaded before any kernel waits
    for call in calls:
        call.route(routes(4, 40, chance))
    torch.cuda.synchronize()
    for call in calls:
        here.run_each(call.launches, [chance.choice((0, 0, 1000, 200_000)) for _ in range(4)])
    torch.cuda.synchronize()
    assert here.failures() == [""] * 4
    assert sum(call.wrong() for call in calls) == 0


def test_a_peer_of_another_call_ends_the_kernels_at_once() -> None:
    """What stands in for its words then must not be taken for numbers of rows."""
    here = World(3)
    good, bad = Rows(here, 4096, 64, 64), Rows(here, 4096, 64, 64, headers=[7, 9, 7])
    for memory in here.memory:
        memory[1 << 18 :].fill_(0x7F)  # staging memory: words of billions of rows
    good.route([[5, 5, 5]] * 3)
    bad.route([[5, 5, 5]] * 3)
    torch.cuda.synchronize()
    here.run_each(good.launches)
    torch.cuda.synchronize()
    assert here.failures() == [""] * 3
    assert good.wrong() == 0
    begin = time.perf_counter()
    here.run_each(bad.launches)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 2
    assert all(here.failures())
