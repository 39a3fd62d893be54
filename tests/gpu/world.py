"""N ranks on one GPU in one process: a workspace, a stream and kernels for each, bases in a plain table.

What is tested so is all but the links: values, order of sums, meetings, guard, limits. A rank that does not take part
in a call is one whose kernel is not launched.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from unisono.gpu.compile import triton_missing
from unisono.gpu.kernels import GpuCall, KernelCalls
from unisono.gpu.launching import Launch
from unisono.gpu.layout import workspace_nbytes
from unisono.gpu.messages import MessageKernels, Side
from unisono.gpu.workspace import Workspace

__all__ = ["NEEDS_GPU", "World"]

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a stream for each rank, and for each of its messages


def _missing() -> str:
    if os.environ.get("UNISONO_TEST_GPU") != "1":
        return "GPUs are hidden in this run: make test-gpu"
    if not torch.cuda.is_available():
        return "there is no GPU"
    return triton_missing()


NEEDS_GPU = pytest.mark.skipif(bool(_missing()), reason=_missing() or "-")
"""For tests that launch kernels."""


class World:
    """``limit``: seconds that a kernel waits."""

    def __init__(self, n: int, limit: float = 5.0) -> None:
        self.n, self.device = n, torch.device("cuda", 0)
        self.memory = [torch.zeros(workspace_nbytes(n), dtype=torch.uint8, device=self.device) for _ in range(n)]
        bases = torch.tensor([m.data_ptr() for m in self.memory], dtype=torch.int64, device=self.device)
        self.spaces = [Workspace(bases.data_ptr(), self.device, bases) for _ in range(n)]
        # Blocks of all ranks must be on the one GPU at once.
        most = torch.cuda.get_device_properties(self.device).multi_processor_count // n
        self.kernels = [KernelCalls(space, rank, n, most, limit) for rank, space in enumerate(self.spaces)]
        self.messages = [MessageKernels(kernels) for kernels in self.kernels]
        self.sides: dict[tuple[str, int, int], torch.cuda.Stream] = {}
        self.streams = [torch.cuda.Stream() for _ in range(n)]
        self.pool, self.kept = ThreadPoolExecutor(n), {}  # type: ignore[var-annotated]
        torch.cuda.synchronize()

    def run(
        self,
        call: GpuCall,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        headers: Sequence[int] = (),
        absent: Sequence[int] = (),
        delays: Sequence[int] = (),
    ) -> None:
        """Launches the call on every rank's stream; all kernels are loaded before the first one waits."""
        headers = headers or [7] * self.n
        launches = list(self.pool.map(lambda rank: self.prepared(rank, call, headers[rank], xs, outs), range(self.n)))
        for rank, launch in enumerate(launches):
            if rank in absent:
                continue
            with torch.cuda.stream(self.streams[rank]):
                if delays:
                    torch.cuda._sleep(delays[rank])  # type: ignore[no-untyped-call]
            launch(self.streams[rank].cuda_stream, xs[rank].data_ptr(), outs[rank].data_ptr())

    def run_whole(self, call: GpuCall, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """As `run`, from a GPU at rest to one at rest; calls of its kind are loaded then."""
        torch.cuda.synchronize()
        self.run(call, xs, outs)
        torch.cuda.synchronize()

    def prepared(self, rank: int, call: GpuCall, header: int, xs: Any, outs: Any) -> Launch:
        """The launch of a rank, kept."""
        key = (rank, call, header, (xs[rank].data_ptr() | outs[rank].data_ptr()) % 16 == 0)
        if key not in self.kept:
            launch = self.kernels[rank].prepare(call, header, key[3])
            assert launch is not None
            self.kept[key] = launch
        return self.kept[key]

    def run_each(self, launches: Sequence[Callable[[int], None]], delays: Sequence[int] = ()) -> None:
        """Launches what each rank has prepared on its stream, after what the current stream has to do."""
        for rank, (launch, stream) in enumerate(zip(launches, self.streams, strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            if delays:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(delays[rank])  # type: ignore[no-untyped-call]
            launch(stream.cuda_stream)

    def send(self, source: int, target: int, x: torch.Tensor, header: int = 7) -> None:
        """Launches a send on the stream of its direction and pair."""
        self.messages[source].launch(self.side("send", source, target), [_side(x, header, target)], [])

    def receive(self, target: int, source: int, out: torch.Tensor, header: int = 7) -> None:
        """Launches a receive on the stream of its direction and pair."""
        self.messages[target].launch(self.side("recv", target, source), [], [_side(out, header, source)])

    def exchange(
        self, rank: int, to: int, xs: Sequence[torch.Tensor], source: int, outs: Sequence[torch.Tensor]
    ) -> None:
        """Launches sends and receives at once."""
        sends, receives = [_side(x, 7, to) for x in xs], [_side(out, 7, source) for out in outs]
        self.messages[rank].launch(self.side("both", rank, 0), sends, receives)

    def side(self, op: str, rank: int, peer: int) -> int:
        """A raw stream."""
        stream = self.sides.get((op, rank, peer)) or self.sides.setdefault((op, rank, peer), torch.cuda.Stream())
        return stream.cuda_stream

    def failures(self) -> list[str]:
        """The kinds of the recorded failures by rank; empty where there is none."""
        return [found.kind if (found := space.failure()) else "" for space in self.spaces]


def _side(tensor: torch.Tensor, header: int, peer: int) -> Side:
    return Side(tensor.data_ptr(), tensor.nbytes, header, peer)
