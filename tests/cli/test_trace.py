import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.bench.result import Rates
from unisono.cli import trace
from unisono.cli.main import app

PROGRAM = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("unisono", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
sys.exit(int(sys.argv[2]))
"""


def _trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_a_program_is_run_traced_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_rates", lambda records: Rates((64,), (2e9,), (2e9,)))
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"), "3"]
    result = _trace("--compute", "--out", str(tmp_path / "out"), "--", *program)
    assert result.exit_code == 3, result.output  # the program's own
    assert "1 ranks, " in result.stdout
    names = {event["name"] for event in json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]}
    assert {"all_reduce", "allreduce", "aten::ones"} <= names
    page = (tmp_path / "out" / "report.html").read_text()
    assert "all_reduce(float32 [4], SUM)" in page
    assert "2 GB/s at 64 B" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "/nowhere/python"], "cannot run /nowhere/python: No such file"),
        (["--", "true"], "no rank has left a record"),
        (["--out", "/proc/none", "--", "true"], "cannot make the directory /proc/none"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _trace(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.count("\n") == 1
