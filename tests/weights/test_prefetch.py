"""Prefetch of a model's tensors before a look at them: it changes no answer, and does no harm once they are freed."""

import numpy as np
import pytest
import torch

from unisono.runtime.loops import CHECKSUM, loops
from unisono.weights.holdings import Holdings
from unisono.weights.prefetch import Prefetch
from unisono.weights.rows import address_of


@pytest.fixture(params=["", "0"], ids=["compiled", "without loops"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the loops are compiled by numba")
    loops.serve(CHECKSUM, at_once=True)
    monkeypatch.setenv("UNISONO_FUSED", request.param)


@pytest.mark.usefixtures("compiled")
def test_a_look_finds_what_has_changed_in_hundreds_of_tensors() -> None:
    model = {f"layer.{i}": torch.zeros(10, 10) for i in range(500)}
    holdings = Holdings()
    assert holdings.look(model)
    assert not holdings.look(model)
    model["layer.499"].data = torch.ones(10, 10)
    assert not holdings.unchanged(model)
    assert holdings.look(model)
    for name in [f"layer.{i}" for i in range(1, 500)]:
        model[name] = torch.ones(10, 10)
    assert not holdings.unchanged(model)
    assert holdings.look(model)
    assert holdings.unchanged(model)


def test_what_is_not_there_any_more_is_not_touched() -> None:
    pytest.importorskip("numba", reason="the loops are compiled by numba")
    loops.serve(CHECKSUM, at_once=True)
    nowhere = np.array([0, 8, -64, 1 << 40, (1 << 47) - 64, 1 << 62] * 20, dtype=np.int64)
    assert loops.of(CHECKSUM)["prefetch"](address_of(nowhere), len(nowhere), 4) == 0
    prefetch = Prefetch([torch.zeros(1 << 18) for _ in range(100)])  # freed at once
    prefetch.begin()
