"""The first call on GPUs, without any: what a rank can not do is a fact before it is a wait."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.backend import device_start
from unisono.backend.device_facts import Facts
from unisono.errors import UsageError
from unisono.gpu import messages
from unisono.gpu.compile import Kernel, compiled, triton_missing

ONE = Facts("a", "GPU", 132, ("a",), ("a",), "", True)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which nothing can be compiled."""

    def fail(*_: object) -> None:
        raise OSError("no C compiler\nfound")

    messages._loaded.cache_clear()
    monkeypatch.setattr(messages, "compiled", fail)


def test_kernels_that_can_not_be_compiled_are_a_fact(failing: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "unisono"):
        assert messages.load_message_kernels(0) == "a rank can not compile kernels: no C compiler"
    assert "all calls on GPUs go by NCCL" in caplog.text
    assert "OSError" in caplog.text


@pytest.mark.parametrize(("kernels", "over_hosts"), [(True, False), (False, False), (True, True)])
def test_the_facts_are_exchanged_after_compiling(
    failing: None, monkeypatch: pytest.MonkeyPatch, kernels: bool, over_hosts: bool
) -> None:
    """Then the ranks go by NCCL; nothing is compiled where there will be no kernels anyway."""
    published: list[Facts] = []

    def exchanged(store: Any, rank: int, global_ranks: Sequence[int], label: str, mine: Facts, seconds: float) -> Any:
        published.append(mine)
        return [ONE, mine]

    group: Any = SimpleNamespace(
        nonce="n", timeout=5.0, rank=1, size=2, global_ranks=[0, 1], label="group x", operations=None,
        segment=SimpleNamespace(elsewhere=object() if over_hosts else None),
        device_guard=SimpleNamespace(messages=None),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(device_start, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(device_start, "own_facts", lambda *_: ONE)
    monkeypatch.setattr(device_start, "exchanged", exchanged)
    monkeypatch.setattr(device_start, "Inner", lambda *_: "NCCL")
    monkeypatch.setattr(device_start, "symmetric_workspace", lambda *_: pytest.fail("no memory is to be mapped"))
    monkeypatch.setattr(device_start, "DeviceMessages", lambda *given: given)
    compiles = kernels and not over_hosts
    if not compiles and not over_hosts:
        monkeypatch.setattr(device_start, "no_kernels", lambda *_: "they are switched off")
    parts = device_start.made(group, None, timedelta(seconds=5), torch.device("cuda", 0), kernels, lambda: None)
    assert (parts.inner, parts.kernels) == ("NCCL", None)
    assert bool(published[0].unable) == compiles


@pytest.mark.skipif(bool(triton_missing()), reason=triton_missing() or "-")
def test_what_a_compiler_raises_is_named() -> None:
    text = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def broken(x, ACC: tl.constexpr, BLOCK: tl.constexpr):\n    nothing_there()\n"
    )
    with pytest.raises(UsageError, match=r"broken can not be compiled: .*UNISONO_GPU_KERNELS=0 leaves all calls"):
        compiled(Kernel("broken", text, "int64", 16, 4), ("cuda", 90, 32))
