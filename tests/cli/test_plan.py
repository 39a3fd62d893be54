from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.cli.main import app
from unisono.measured import Measured, Row


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_explains_a_size_then_shows_all_sizes_and_crossovers() -> None:
    result = _plan("all_reduce", "--bytes", "1MiB", "--ranks", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "all_reduce of 1 MiB over 4 ranks: two_phase, 238 µs by the model"
    assert lines[2].startswith("  because bytes on the wire dominate")
    assert any(line.split()[:4] == ["4", "B", "one_shot", "1"] for line in lines)
    assert any(line.split()[:3] == ["1", "GiB", "two_phase"] for line in lines)
    # alpha + 3 S (beta + gamma) meets 2 alpha + 1.5 S beta + 0.75 S gamma at 2667 bytes; found to within a percent
    assert lines[-2] in {f"one_shot up to {x} KiB, then two_phase" for x in ("2.6", "2.61", "2.62", "2.63")}
    assert lines[-1].startswith("not considered: hierarchical (has one host to work on), in_network")
    assert all(len(line) <= 80 for line in lines if "B  " in line[:9])


def test_only_the_table_without_a_size() -> None:
    result = _plan("all_gather", "-n", "4", "--topology", "cluster", "--hosts", "2")
    assert result.stdout.startswith("cluster: 2 hosts of 2 ranks over nvlink")


def test_a_barrier_has_no_sizes() -> None:
    result = _plan("barrier", "-n", "4")
    assert result.stdout.startswith("barrier over 4 ranks: one_shot, 1 µs by the model\n")
    assert "GiB" not in result.stdout


def test_what_was_measured_here_counts_more_than_the_model() -> None:
    Measured([Row("all_reduce", 2, "star", 1024, 1e-6), Row("all_reduce", 2, "ring", 1024, 3e-6)]).save()
    lines = _plan("all_reduce", "--bytes", "1KiB", "-n", "2").stdout.splitlines()
    assert lines[0] == "all_reduce of 1 KiB over 2 ranks: star, 1 µs as measured here"
    assert "star at every size" in lines
    for model in (["--model"], ["--topology", "shared_memory"]):
        assert "by the model" in _plan("all_reduce", "--bytes", "1KiB", "-n", "2", *model).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce"], "unknown collective 'allreduce': expected one of all_reduce, "),
        (["all_reduce", "-n", "0"], "at least 1 rank"),
        (["all_reduce", "--bytes", "many"], "'many' is not a size"),
        (["all_reduce", "--topology", "pigeon"], "unknown topology 'pigeon'"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_spoilt_table_is_named(tmp_path: Path) -> None:
    path = Measured().save()
    path.write_text("no table")
    result = _plan("all_reduce")
    assert result.exit_code == 2
    assert f"{path} is no table of `unisono tune`" in result.stderr
