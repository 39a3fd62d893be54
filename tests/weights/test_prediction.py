"""The predicted time of a push: from a given table of measured updates, against numbers computed here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from unisono import tune
from unisono.bench.result import Row
from unisono.selection import Measured, Push
from unisono.weights import layout, plan, prediction
from unisono.weights.plan import Plan
from unisono.weights.prediction import push_seconds

CALL, PIECE, CACHED, PAST = 1e-3, 2e-6, 1e-10, 3e-10
MODELS = ((1, 4), (2000, 800_000), (16, 4_000_000), (64, 32_000_000))
"""Tensors and bytes; the last one does not stay in caches."""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So many cores, and a table of this machine that is empty."""
    monkeypatch.setattr(prediction, "cores", lambda: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def seconds(turns: float, pieces: float, nbytes: float, past: bool, slower: float = 1.0) -> float:
    return slower * (CALL * turns + PIECE * pieces + (PAST if past else CACHED) * nbytes)


def table(slower: float = 1.0) -> Measured:
    """To 1 on 2 ranks, which move all bytes side by side; to 3 on 4, where a core takes the work of two ranks."""
    found = []
    for tensors, nbytes in MODELS:
        past = nbytes > 4 << 20
        found += [
            Push("update", 1, 2, tensors, nbytes, seconds(1, tensors, nbytes, past)),
            Push("update", 1, 4, tensors, nbytes, seconds(2, 2 * tensors, 2 * nbytes, past, slower)),
            Push("mapped", 1, 2, tensors, nbytes, seconds(1, tensors, nbytes, past, 5.0)),
            Push("reshard", 2, 4, tensors, nbytes, seconds(2, 4 * tensors, nbytes, past, 7.0)),
        ]
    return Measured(pushes=found)


def whole(tensors: int, elements: int, replicas: int) -> Plan:
    with torch.device("meta"):
        held = layout({f"layer.{i}": torch.empty(elements) for i in range(tensors)})
    return plan(held, [held] * replicas, forward="direct")


def test_whole_replicas() -> None:
    large, small = (300, 28_000), (3000, 100)
    for (tensors, elements), past in ((large, True), (small, False)):
        nbytes = 4 * tensors * elements
        one, three = whole(tensors, elements, 1), whole(tensors, elements, 3)
        assert push_seconds(one, table(), "update") == pytest.approx(seconds(1, tensors, nbytes, past))
        assert push_seconds(three, table(), "update") == pytest.approx(seconds(2, 2 * tensors, 2 * nbytes, past))
        assert push_seconds(three, table(9.0), "update") == pytest.approx(
            seconds(2, 2 * tensors, 2 * nbytes, past, 9.0)
        )
        assert push_seconds(one, table(), "mapped") == pytest.approx(seconds(1, tensors, nbytes, past, 5.0))
        assert push_seconds(one, table(), "shared") is None


def test_a_number_of_ranks_that_was_not_measured_has_the_costs_of_the_nearest() -> None:
    seven = whole(300, 28_000, 7)  # 8 ranks by turns on 2 cores, 8 times the bytes
    assert push_seconds(seven, table(9.0), "update") == pytest.approx(seconds(4, 1200, 4 * 33_600_000, True, 9.0))
    one_copy = push_seconds(seven, table(), "mapped")  # written once, and read once by all together
    assert one_copy == pytest.approx(seconds(4, 1200, 33_600_000, True, 5.0))


def test_rows_to_columns() -> None:
    with torch.device("meta"):
        held = layout({f"layer.{i}": torch.empty(160, 176) for i in range(300)})
    made = plan(held.split(2, {"*": 0}), held.split(2, {"*": 1}))
    nbytes = 300 * 160 * 176 * 4  # each tensor in 4 pieces, packed and read; two ranks of each side work side by side
    assert push_seconds(made, table(), "reshard") == pytest.approx(seconds(2, 1200, nbytes, True, 7.0))
    table().save()
    found = made.predict()
    assert (found.where, found.seconds) == ("this host, as measured", push_seconds(made, table(), "reshard"))
    assert found.bound == pytest.approx(7 * (CALL + PAST * nbytes / 2))


def test_without_measured_updates_the_plan_is_simulated() -> None:
    made = whole(300, 28_000, 1)
    assert made.predict() == ("shared_memory", made.simulate().time, made.bound())
    assert push_seconds(made, Measured(), "update") is None
    table().save()
    assert made.predict().seconds == push_seconds(made, table(), "update")
    assert made.predict("shared_memory") == ("shared_memory", made.simulate().time, made.bound())


def test_a_measured_update_is_the_least_of_each_pass_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"to 1": [[5.0, 3.0, 4.0], [6.0, 9.0, 7.0]], "to 1, shared": [[2.0], [1.0]], "to 1, mapped": [[8.0], [8.0]]}

    def launch(settings: Any, report: Any) -> None:
        assert [case.name for case in settings.cases] == [f"20x10 {way}" for way in took] * 2
        for number in (0, 1):
            for way, passes in took.items():
                given = {"nbytes": 800, "count": 200, "dtype": "float32", "op": "none", "place": "in", "ranks": 2}
                report(Row(way, "weights", **given, iterations=1, seconds=tuple(passes[number]), bound=0.0))

    monkeypatch.setattr(tune, "_MODELS", ((20, 10),))
    monkeypatch.setattr(tune, "launch_weights", launch)
    told = list[Push]()
    measured = tune.tune_weights(2, told.append)
    assert {push.way: push.seconds for push in measured.pushes} == {"update": 4.5, "shared": 1.5, "mapped": 8.0}
    assert [push.seconds for push in told] == [3.0, 2.0, 8.0, 6.0, 1.0, 8.0]
