"""The launch of a compiled kernel, with a stand-in for the driver: what it is given, and what it may refuse."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.errors import UnisonoError, UsageError
from unisono.gpu import launching

MADE = SimpleNamespace(
    src=SimpleNamespace(signature={"x": "*bf16", "out": "*bf16", "count": "i32", "limit": "i64", "BLOCK": "constexpr"}),
    metadata=SimpleNamespace(num_warps=8, shared=512, name="two_phase"),
    function=77,
    _init_handles=lambda: None,
)


class Driver:
    """Notes launches; each gives the next of ``codes``, then 0. The current context is that of GPU 1."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.launches, self.context = list(codes), list[tuple[Any, ...]](), 11

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: None) -> int:
        config = config._obj
        words = [ctypes.c_int64.from_address(place).value for place in places]
        shape = list(config.blocks), list(config.threads), config.shared, config.stream
        self.launches.append((self.context, function.value, shape, words))
        return self.codes.pop(0) if self.codes else 0

    def cuCtxGetCurrent(self, found: Any) -> int:
        found._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(launching, "_driver", lambda: found)
    return found


def test_a_launch_writes_addresses_and_stream(driver: Driver) -> None:
    launch = launching.launcher(MADE, 3, (-5, 1 << 40))
    launch(9, 1000, 2000)
    launch(8, 3000, 4000)
    shapes = [([3, 1, 1], [256, 1, 1], 512, stream) for stream in (9, 8)]
    assert driver.launches == [
        (11, 77, shapes[0], [1000, 2000, -5, 1 << 40, 0, 0]), (11, 77, shapes[1], [3000, 4000, -5, 1 << 40, 0, 0]),
    ]  # fmt: skip
    assert ctypes.c_int32.from_buffer(ctypes.c_int64(-5)).value == -5  # as a kernel reads 32 bits of a word


def test_a_launch_of_messages_writes_all(driver: Driver) -> None:
    launching.message_launcher(MADE)(4, 9, (1, 2, 3, 4))
    assert driver.launches == [(11, 77, ([4, 1, 1], [256, 1, 1], 512, 9), [1, 2, 3, 4, 0, 0])]


def test_a_thread_of_another_gpu_launches_on_the_kernels(driver: Driver) -> None:
    launch = launching.launcher(MADE, 1, (0, 0))
    driver.context, driver.codes = 22, [400]
    launch(9, 1, 2)
    assert [context for context, *_ in driver.launches] == [22, 11]
    assert driver.context == 22


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    launch = launching.launcher(MADE, 1, (0, 0))
    driver.codes = [719]
    with pytest.raises(UnisonoError, match="error 719 of cuLaunchKernelEx"):
        launch(9, 1, 2)

    def full() -> None:
        raise RuntimeError("out of memory")

    made = SimpleNamespace(**vars(MADE) | {"_init_handles": full})
    with pytest.raises(UsageError, match="two_phase can not be loaded: RuntimeError: out of memory"):
        launching.launcher(made, 1, (0, 0))
