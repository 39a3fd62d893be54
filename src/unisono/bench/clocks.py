"""What is timed: a block of calls on the host, or their replay on a GPU.

Of a CUDA graph the GPU's own time counts. The GPUs start together: each first waits for as long as its host takes to
queue everything, then makes one call, at whose end all are at the same point.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from unisono.bench.settings import Settings

__all__ = ["Clock", "HostClock", "clock_of"]

_MOST_CALLS, _MOST_IN_GRAPH, _MOST_EAGER, _MOST_NBYTES = 20_000, 50, 200, 256 << 20
_QUEUEING = 400_000  # cycles that a GPU waits for its host, about 0.2 ms
_FILLER_NUMEL = 8 << 10  # of the small kernels between calls


class HostClock:
    """The host's time. On GPUs that is what the host spends until it goes on, not until the GPU is done.

    ``most``: calls of a block.
    """

    def __init__(self, call: Callable[[], Any], most: int = _MOST_CALLS, on_gpu: bool = False) -> None:
        self._call, self.most, self._on_gpu = call, most, on_gpu

    def seconds(self, iterations: int) -> float:
        """This rank's mean seconds per call, of a block of so many; all ranks ask at the same time."""
        call, block = self._call, range(iterations)
        if self._on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in block:
            call()
        taken = time.perf_counter() - began
        if self._on_gpu:
            torch.cuda.synchronize()
        return taken / iterations

    def close(self) -> None:
        """Nothing to free."""


class GraphClock:
    """The GPU's time of a replay; ``between``: with a small kernel after each call, whose own time does not count."""

    most = _MOST_IN_GRAPH

    def __init__(self, call: Callable[[], Any], between: bool = False) -> None:
        self._call, self._iterations = call, 0
        self._filler = torch.zeros(_FILLER_NUMEL, device="cuda", dtype=torch.bfloat16) if between else None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        event: Any = torch.cuda.Event
        self._events = event(enable_timing=True), event(enable_timing=True)

    def seconds(self, iterations: int) -> float:
        """The graph is captured where the number of calls has changed."""
        if iterations != self._iterations:
            self.close()
            self._graphs = [self._captured(iterations, self._call)]
            if self._filler is not None:
                self._graphs.append(self._captured(iterations))
            self._iterations = iterations
        taken = [self._replayed(graph) for graph in self._graphs]
        return max(taken[0] - sum(taken[1:]), 1e-9) / iterations

    def _captured(self, iterations: int, call: Callable[[], Any] | None = None) -> torch.cuda.CUDAGraph:
        graph, filler = torch.cuda.CUDAGraph(), self._filler
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")  # without the garbage collection of torch.cuda.graph
            try:
                for _ in range(iterations):
                    if call is not None:
                        call()
                    if filler is not None:
                        filler.mul_(1.0)
            finally:
                graph.capture_end()
        return graph

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        began, ended = self._events
        torch.cuda.synchronize()
        torch.cuda._sleep(_QUEUEING)  # type: ignore[no-untyped-call]
        self._call()
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def close(self) -> None:
        """Frees the graphs: a group of NCCL does not end while one with its calls lives."""
        torch.cuda.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs, self._iterations = [], 0


Clock = HostClock | GraphClock


def clock_of(settings: Settings, timing: str, call: Callable[[], Any], nbytes: int) -> Clock:
    """The clock for calls on ``nbytes``. Large eager calls come in short blocks: the GPU must do each of them."""
    if settings.device == "cpu":
        return HostClock(call)
    if timing in ("graph", "between"):
        return GraphClock(call, timing == "between")
    return HostClock(call, max(5, min(_MOST_EAGER, _MOST_NBYTES // max(1, nbytes))), on_gpu=True)
