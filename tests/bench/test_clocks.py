"""What a block of calls takes: on the host, and on a GPU that is stood in for, whose every kernel has a known time."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.bench import clocks
from unisono.bench.clocks import GraphClock, HostClock, clock_of
from unisono.bench.settings import Settings

CALL, FILLER = 5.0, 2.0  # µs of a call, and of a small kernel


class Gpu:
    """Runs what is launched at once, or captures it; ``now`` in µs. ``cuda`` stands for torch.cuda."""

    def __init__(self) -> None:
        self.now, self.captures, self.alive = 0.0, 0, 0
        self.capturing: list[float] | None = None
        gpu = self

        class Graph:
            def capture_begin(self, capture_error_mode: str) -> None:
                gpu.capturing, gpu.captures, gpu.alive = [], gpu.captures + 1, gpu.alive + 1

            def capture_end(self) -> None:
                self.kernels, gpu.capturing = gpu.capturing or [], None

            def replay(self) -> None:
                gpu.now += sum(self.kernels)

            def reset(self) -> None:
                gpu.alive -= 1

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, other: "Event") -> float:
                return (other.at - self.at) / 1e3  # ms

        self.cuda = SimpleNamespace(
            CUDAGraph=Graph, Event=Event, Stream=object, stream=nullcontext, synchronize=lambda: None,
            _sleep=lambda cycles: gpu.launch(200.0),
        )  # fmt: skip

    def launch(self, micro: float) -> None:
        if self.capturing is None:
            self.now += micro
        else:
            self.capturing.append(micro)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    filler = SimpleNamespace(mul_=lambda factor: made.launch(FILLER))
    stand_in = SimpleNamespace(cuda=made.cuda, zeros=lambda *shape, **how: filler, bfloat16=torch.bfloat16)
    monkeypatch.setattr(clocks, "torch", stand_in)
    return made


@pytest.mark.parametrize("between", [False, True])
def test_a_replay_is_timed_without_what_leads_up_to_it(gpu: Gpu, between: bool) -> None:
    clock = GraphClock(lambda: gpu.launch(CALL), between)
    for iterations in (1, 20, 20):
        assert clock.seconds(iterations) == pytest.approx(CALL * 1e-6)
    assert gpu.captures == 2 * (1 + between)  # again only where the number of calls has changed
    clock.close()
    assert gpu.alive == 0


def test_a_call_that_costs_nothing_between_kernels_still_has_a_time(gpu: Gpu) -> None:
    assert 0 < GraphClock(lambda: None, between=True).seconds(10) < 1e-9


def test_a_call_that_cannot_be_captured_ends_the_capture(gpu: Gpu) -> None:
    def call() -> None:
        raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="not in a capture"):
        GraphClock(call).seconds(1)
    assert gpu.capturing is None


def test_the_clock_of_each_timing(gpu: Gpu) -> None:
    def made(device: str, timing: str, nbytes: int = 8) -> Any:
        return clock_of(Settings(device=device), timing, lambda: gpu.launch(CALL), nbytes)

    assert isinstance(made("cpu", "eager"), HostClock)
    assert [type(made("cuda", timing)) for timing in ("graph", "between", "eager", "async")] == [
        GraphClock, GraphClock, HostClock, HostClock,
    ]  # fmt: skip
    assert made("cuda", "between").seconds(3) == pytest.approx(CALL * 1e-6)
    most = [made("cuda", "eager", nbytes).most for nbytes in (0, 1 << 20, 16 << 20, 1 << 30)]
    assert most == [200, 200, 16, 5]  # the GPU does each of them
    assert made("cpu", "eager", 1 << 30).most > 1000


def test_a_host_waits_for_its_gpu_outside_the_time(gpu: Gpu) -> None:
    order: list[str] = []
    gpu.cuda.synchronize = lambda: order.append("synchronize")
    call: Callable[[], None] = lambda: order.append("call")  # noqa: E731
    assert HostClock(call, on_gpu=True).seconds(2) > 0
    assert order == ["synchronize", "call", "call", "synchronize"]
