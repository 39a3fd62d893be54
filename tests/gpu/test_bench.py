"""`unisono bench`, `tune` and `train` on one GPU and on two: timings, contenders, checked results, choices, losses."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gpu.world import NEEDS_GPU
from unisono.bench.result import Result
from unisono.cli.main import app
from unisono.selection import Measured

pytestmark = [NEEDS_GPU, pytest.mark.timeout(300)]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
TIMINGS = {"graph", "between", "eager", "async"}


def measured(tmp_path: Path, *arguments: str) -> Result:
    kept = tmp_path / "bench.json"
    words = ["bench", *arguments, "--device", "cuda", "--runs", "3", "--seconds", "0.2", "--json", str(kept)]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    return Result.load(kept)


def test_one_rank(tmp_path: Path) -> None:
    found = measured(tmp_path, "all_reduce", "all_gather", "-n", "1", "--bytes", "4K,1M", "--against", "nccl")
    assert {(row.timing, row.refused, row.wrong) for row in found.rows} == {(timing, "", 0) for timing in TIMINGS}
    assert {row.device for row in found.rows} == {"cuda"}
    for row in found.rows:  # a graph of one rank's calls of NCCL is empty
        assert row.time < 1e-2
        assert row.time > 1e-7 or row.timing == "between" or (row.timing == "graph" and row.contender == "nccl")


@NEEDS_TWO
def test_tune_measures_kernels_and_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["tune", "all_reduce", "all_gather", "--device", "cuda", "-n", "2", "--bytes", "4K,1M"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    found = {(row.collective, row.algorithm) for row in Measured.load().rows if row.device == "cuda"}
    kernels = {("all_reduce", "one_shot"), ("all_reduce", "two_phase"), ("all_gather", "direct")}
    assert kernels | {("all_reduce", "nccl"), ("all_gather", "nccl")} <= found
    assert "measured on this host by `unisono tune`" in ran.stdout


def trained(tmp_path: Path, *arguments: str) -> str:
    small = ["--device", "cuda", "--steps", "8", "--layers", "2", "--plot", str(tmp_path / "loss.png")]
    ran = CliRunner().invoke(app, ["train", *small, *arguments], env={"COLUMNS": "120"})
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_training_on_one_gpu(tmp_path: Path) -> None:
    assert "training loss, last step" in trained(tmp_path, "-n", "1")


@NEEDS_TWO
@pytest.mark.parametrize("mesh", [(), ("--tp", "2"), ("--dp", "2", "--tp", "1")])
def test_training_loses_as_with_nccl(tmp_path: Path, mesh: tuple[str, ...]) -> None:
    printed = trained(tmp_path, "-n", "2", *mesh, "--compare", "nccl")
    gap = re.search(r"largest difference of the loss in any step.*?(\d\.\de[+-]\d\d)", printed)
    assert gap is not None, printed
    assert float(gap[1]) < 1e-3


@NEEDS_TWO
def test_two_ranks_against_nccl_and_symmetric_memory(tmp_path: Path) -> None:
    arguments = ("-n", "2", "-d", "bfloat16", "--bytes", "4K,1M", "--against", "nccl,symm_mem")
    found = measured(tmp_path, "all", *arguments)
    served = {(row.collective, row.contender, row.timing) for row in found.rows if row.seconds}
    for timing in TIMINGS:
        assert {("all_reduce", f"symm_mem:{way}", timing) for way in ("one_shot", "two_shot")} <= served
        assert {(row.collective, name, timing) for row in found.rows for name in ("unisono", "nccl")} <= served
    assert {row.wrong for row in found.rows if row.seconds} == {0}
