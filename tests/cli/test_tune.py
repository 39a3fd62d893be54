from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono import tune as tuning
from unisono.bench.result import Row as BenchRow
from unisono.cli import tune
from unisono.cli.main import app
from unisono.cli.predicted import predicted_lines
from unisono.schedule.topology_file import load_topology
from unisono.selection import Measured, Row, table_path
from unisono.tune import GPU_COLLECTIVES


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_measures_prints_and_keeps() -> None:
    result = _tune("broadcast", "-n", "2", "--bytes", "64,4KiB", "--algorithms", "default,tree,chain")
    assert result.exit_code == 0, result.stderr
    assert "broadcast over 2 ranks, measured" in result.stdout
    assert result.stdout.rstrip().endswith(f"kept in {table_path()}")
    table = Measured.load()
    assert table.algorithms("broadcast", 2) == ["chain", "default", "tree"]
    assert len(table) == 6
    assert all(0 < row.seconds < 10 for row in table.rows)
    again = CliRunner().invoke(app, ["plan", "broadcast", "-n", "2", "--bytes", "64"])
    assert "as measured here" in again.stdout


def test_what_is_predicted_stands_beside_what_was_measured_and_is_kept() -> None:
    result = _tune("all_gather", "-n", "2", "--bytes", "64,4KiB", "--algorithms", "default,direct,ring,star")
    assert result.exit_code == 0, result.stderr
    assert "all_gather over 2 ranks, predicted" in result.stdout
    assert "Fitted to direct and star: a call " in result.stdout
    assert "Predicted with a median error of " in result.stdout
    kept = load_topology()
    assert (kept.world_size, kept.hosts) == (2, 1)
    assert kept.memory is not None
    assert kept.memory.call + kept.memory.meeting > 0
    again = CliRunner().invoke(app, ["simulate", "ring", "all_gather", "--topology", "measured", "--bytes", "4KiB"])
    assert again.stdout.startswith("ring all_gather of 4 KiB over 2 ranks: "), again.stderr
    assert "as ranks execute it there, by what was measured: " in again.stdout
    row = BenchRow("all_gather", "unisono:ring", 4096, 512, "float32", "none", "out", 2, 1, (1e-3,))
    (line,) = predicted_lines([row, replace(row, contender="gloo"), replace(row, seconds=())], 2)
    assert line.startswith("# predicted all_gather of unisono:ring: 4 KiB ")
    assert "; median error " in line
    assert predicted_lines([row], 3) == []


def test_on_gpus_the_table_of_choices_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_all(wanted: list[str], ranks: int, sizes: list[int], *rest: object) -> Measured:
        assert (wanted, ranks, sizes[-1], rest[-1]) == ([*GPU_COLLECTIVES], 2, 16 << 20, "cuda")
        times = {"one_shot": 1e-6, "nccl": 3e-6}  # larger calls go by the built-in rows
        return Measured([Row("all_reduce", 2, name, 4096, seconds, "cuda") for name, seconds in times.items()])

    monkeypatch.setattr(tune, "measure_all", measure_all)
    monkeypatch.setattr(tune, "count_gpus", lambda ranks: 2)
    result = _tune("--device", "cuda")
    assert result.exit_code == 0, result.stderr
    assert "│ 4 KiB │ 3 µs │   1 µs * │" in result.stdout
    chosen = "all_reduce      1 MiB   one_shot\n                16 MiB  two_phase\nall_gather      32 MiB  direct\n"
    assert chosen in result.stdout
    planned = CliRunner().invoke(app, ["plan", "--default", "--device", "cuda", "-n", "2"])
    assert chosen in planned.stdout
    assert "For 2 ranks on GPUs, measured on this host by `unisono tune`." in planned.stdout
    planned = CliRunner().invoke(app, ["plan", "--default", "all_reduce", "--device", "cuda", "-n", "4"])
    assert "all_reduce  512 KiB  one_shot\n            16 MiB   two_phase\n" in planned.stdout
    assert "For 4 ranks on GPUs, built in." in planned.stdout


def test_updates_of_weights_are_measured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_MODELS", ((1, 1), (20, 10)))
    result = _tune("weights", "-n", "2")
    assert result.exit_code == 0, result.stderr
    assert "weights, measured" in result.stdout
    assert f"kept in {table_path()}" in result.stdout
    pushes = Measured.load().pushes
    models = [(way, 1, 2, *model) for way in ("mapped", "shared", "update") for model in ((1, 4), (20, 800))]
    assert [(p.way, p.senders, p.ranks, p.tensors, p.nbytes) for p in pushes] == models
    assert all(0 < push.seconds < 10 for push in pushes)


def test_keeps_nothing_if_asked_so() -> None:
    result = _tune("barrier", "-n", "2", "--algorithms", "default", "--no-keep")
    assert result.exit_code == 0, result.stderr
    assert not table_path().exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown collective 'nope'"),
        (["all_reduce", "-n", "0"], "--ranks is 0, expected 1 or more"),
        (["weights", "-n", "1"], "weights go from one rank to others: --ranks is 1, expected 2 or more"),
        (["all_reduce", "--bytes", "1,x"], "'x' is not a size"),
        (["all_reduce", "--bytes", "0"], "tune measures sizes of 1 byte or more, got 0"),
        (["barrier", "--device", "cuda"], "unknown collective 'barrier': expected one of all_reduce, all_gather"),
        (["--device", "gpu"], "unknown --device 'gpu'"),
        (["all_reduce", "--algorithms", "in_network"], "no algorithm 'in_network' can run all_reduce"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _tune(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
