"""`unisono bench --device cuda` on one GPU and on two: every timing, every contender, checked results, JSON."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gpu.world import NEEDS_GPU
from unisono.bench.result import Result
from unisono.cli.main import app

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
    assert all(1e-7 < row.time < 1e-2 for row in found.rows if row.timing != "between")


@NEEDS_TWO
def test_two_ranks_against_nccl_and_symmetric_memory(tmp_path: Path) -> None:
    arguments = ("-n", "2", "-d", "bfloat16", "--bytes", "4K,1M", "--against", "nccl,symm_mem")
    found = measured(tmp_path, "all", *arguments)
    served = {(row.collective, row.contender, row.timing) for row in found.rows if row.seconds}
    for timing in TIMINGS:
        assert {("all_reduce", f"symm_mem:{way}", timing) for way in ("one_shot", "two_shot")} <= served
        assert {(row.collective, name, timing) for row in found.rows for name in ("unisono", "nccl")} <= served
    assert {row.wrong for row in found.rows if row.seconds} == {0}
