"""The table that tune makes of what the bench measures; and real ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from unisono import tune as module
from unisono.algorithms import names
from unisono.bench.result import Rates
from unisono.bench.result import Row as Result
from unisono.bench.settings import Settings
from unisono.errors import UsageError
from unisono.selection import BY_DEFAULT, Measured, Row
from unisono.tune import runnable, tune


def test_measures_everything_that_can_run_and_leaves_out_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def bench(settings: Settings, tell: Callable[[Rates | Result], None]) -> None:
        tell(Rates())
        for collective in settings.collectives:
            for nbytes in settings.sizes(collective):
                for contender in settings.contenders:
                    asked.append((collective, contender.algorithm, nbytes))
                    refused = "does not fit" if contender.algorithm == "tree" else ""
                    times = () if refused else (1e-6 * (1 + nbytes),) * settings.runs
                    how = {"seconds": times, "refused": refused, "requested": nbytes}
                    row = Result(collective, contender.name, 4, 1, "float32", "sum", "in", 4, **how)
                    tell(row)

    monkeypatch.setattr(module, "launch", bench)
    told: list[Row] = []
    table = tune(["all_reduce", "barrier"], 4, [64, 8, 64], on_row=told.append)
    algorithms = ["", *runnable("all_reduce", "barrier")]
    assert asked == [(c, a, s) for c, s in (("all_reduce", 8), ("all_reduce", 64), ("barrier", 0)) for a in algorithms]
    assert sorted(told) == table.rows
    assert "tree" not in table.algorithms("all_reduce", 4)
    assert table.seconds("all_reduce", 4, "ring", 8) == pytest.approx(9e-6)
    assert table.seconds("all_reduce", 4, BY_DEFAULT, 64) == pytest.approx(65e-6)


def test_on_gpus_the_schedules_of_the_table_and_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Settings] = []

    def bench(settings: Settings, tell: Callable[[Rates | Result], None]) -> None:
        seen.append(settings)
        for contender in settings.contenders:
            row = Result("all_reduce", contender.name, 4, 1, "float32", "sum", "in", 2, 1, (1e-6,), requested=64)
            tell(row)

    monkeypatch.setattr(module, "launch", bench)
    table = tune(["all_reduce", "all_gather"], 2, [64], device="cuda")
    assert [contender.name for contender in seen[0].contenders] == [
        "nccl", "unisono:one_shot", "unisono:two_phase", "unisono:direct", "unisono:star",
    ]  # fmt: skip
    assert (seen[0].device, seen[0].timings) == ("cuda", ("graph",))
    assert {(row.algorithm, row.device) for row in table.rows} == {
        (name, "cuda") for name in ("nccl", "one_shot", "two_phase", "direct", "star")
    }
    table.save(tmp_path / "kept")
    assert Measured.load(tmp_path / "kept").rows == table.rows
    assert table.algorithms("all_reduce", 2) == []  # of CPUs


def test_what_only_a_switch_can_do_is_not_run() -> None:
    assert "in_network" in names("all_reduce")
    assert "in_network" not in runnable("all_reduce")


def test_real_ranks_measure_what_fits() -> None:
    table = tune(["broadcast", "barrier"], 2, [128], [BY_DEFAULT, "tree", "ring"])
    assert table.algorithms("broadcast", 2) == [BY_DEFAULT, "tree"]  # a ring does no broadcast
    assert {row.algorithm: row.nbytes for row in table.rows if row.collective == "barrier"}["ring"] == 0
    assert all(0 < row.seconds < 10 for row in table.rows)


def test_sizes_are_those_asked_for_though_elements_are_whole() -> None:
    table = tune(["all_gather", "all_to_all"], 3, [1, 2, 64, 1000], [BY_DEFAULT])
    for collective in ("all_gather", "all_to_all"):  # of 4-byte elements: 12, 12, 60 and 996 bytes
        assert [row.nbytes for row in table.rows if row.collective == collective] == [1, 2, 64, 1000]


def test_asks_for_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(module, "launch", lambda settings, tell: seen.append(settings))
    monkeypatch.setenv("UNISONO_REPLACES", "gloo")  # which matters to whom measures Gloo
    tune(["all_reduce"], 65, [64], ["ring", "ring", BY_DEFAULT])  # exact sums reach to 64, and none is checked
    tune(["barrier"], 2, [0], [BY_DEFAULT])
    assert [[each.name for each in settings.contenders] for settings in seen] == [
        ["unisono:ring", "unisono"],
        ["unisono"],
    ]
    assert [settings.ranks for settings in seen] == [65, 2]


@pytest.mark.parametrize(("sizes", "words"), [([0], "got 0"), ([64, 0], "got 64, 0"), ([], "got none")])
def test_sizes_without_bytes_are_refused(sizes: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=f"tune measures sizes of 1 byte or more, {words}"):
        tune(["all_reduce", "barrier"], 2, sizes)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="expected 1 or more"):
        tune(["all_reduce"], 0)
