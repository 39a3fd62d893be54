"""A rank that was late once, on two GPUs: the calls that follow it take what they take without it."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.world import NEEDS_GPU
from ranks import ranks
from unisono.torch_names import all_gather_single

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
NUMEL, CALLS, RUNS = 1 << 20, 50, 20  # of bfloat16, in 128 blocks; calls of a graph; replays of each kind
CYCLES_OF_MS = 1_900_000


def replayed(call: Callable[[], Any], graph: torch.cuda.CUDAGraph, cycles: int) -> float:
    """Milliseconds of the replay on a GPU that first waits for so many cycles behind its peer."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES_OF_MS // 2)  # type: ignore[no-untyped-call]
    call()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended))


def prompt_and_late(rank: int, world_size: int) -> tuple[float, float]:
    """Rank 1's medians of replays that both ranks begin together, and of those that it begins a millisecond late."""
    torch.cuda.set_device(rank)
    whole, part = (torch.zeros(k * NUMEL, dtype=torch.bfloat16, device="cuda") for k in (2, 1))

    def call() -> None:
        all_gather_single(whole, part, dist.group.WORLD)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for late, kept in enumerate(times):
            kept.append(replayed(call, graph, CYCLES_OF_MS if late and rank else 1))
    graph.reset()
    return statistics.median(times[0]), statistics.median(times[1])


def test_the_calls_after_it_are_as_fast() -> None:
    """Waiting ranks once took 0.1 ms to look for a word of their host, so that each call made the next one wait."""
    prompt, late = ranks(2).run(prompt_and_late, timeout=200)[1]
    assert late < 1.5 * prompt, (prompt, late)
