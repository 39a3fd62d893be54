import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from traces.records import call, two_ranks, write
from unisono.bench.result import Rates
from unisono.cli import trace
from unisono.cli.main import app

PROGRAM = """
import sys
import torch, torch.distributed as dist, unisono
dist.init_process_group("unisono", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
kept = unisono.prepare("barrier")  # and with it the group, until the interpreter ends
dist.destroy_process_group()
sys.exit(int(sys.argv[2]))
"""


def _trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_a_program_is_run_traced_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_rates", lambda ranks: Rates((64,), (2e9,), (2e9,)))
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"), "3"]
    result = _trace("--compute", "--out", str(tmp_path / "out"), "--", *program)
    assert result.exit_code == 3, result.output  # the program's own
    assert "1 rank, " in result.stdout
    names = {event["name"] for event in json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]}
    assert {"all_reduce", "allreduce", "aten::ones"} <= names
    page = (tmp_path / "out" / "report.html").read_text()
    assert "all_reduce(float32 [4], SUM)" in page
    assert "2 GB/s at 64 B" in page


def test_a_failing_program_without_a_record_gives_its_code_and_no_old_results(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    assert _trace("--no-bound", "--out", str(tmp_path / "out"), "--from", str(tmp_path)).exit_code == 0
    assert len(list((tmp_path / "out").iterdir())) == 2
    result = _trace("--out", str(tmp_path / "out"), "--", "false")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("unisono: no rank has left a record")
    assert not list((tmp_path / "out").iterdir())


def test_launches_are_reported_each_by_itself(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    write(tmp_path, 0, pid=300, calls=[call(1, 9000, 9500, memory="later")], groups={"later": [0]})
    result = _trace("--no-bound", "--out", str(tmp_path / "out"), "--from", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("launch")] == ["launch 1 of 2:", "launch 2 of 2:"]
    assert [line.split(",")[0] for line in lines if " communicating" in line] == ["2 ranks", "1 rank"]
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")}
    assert found == {f"launch-{k}/{name}" for k in (1, 2) for name in ("trace.json", "report.html")}


def test_a_folder_collected_without_the_command_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable alone collects, into a directory that need not exist."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("UNISONO_TRACE", str(tmp_path / "not" / "there"))
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"), "0"]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stderr == ""
    result = _trace("--no-bound", "--out", str(tmp_path / "out"), "--from", str(tmp_path / "not" / "there"))
    assert result.exit_code == 0, result.output
    assert "all_reduce(float32 [4], SUM)" in (tmp_path / "out" / "report.html").read_text()


def test_a_rank_that_is_terminated_leaves_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun ends its ranks, right behind a Ctrl-C."""
    end = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "program.py").write_text(PROGRAM.partition("dist.destroy_process_group()")[0] + end)
    monkeypatch.setenv("UNISONO_TRACE", str(tmp_path / "there"))
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store"), "0"]
    assert subprocess.run(program, capture_output=True, text=True, check=False).returncode == -signal.SIGTERM
    result = _trace("--no-bound", "--out", str(tmp_path / "out"), "--from", str(tmp_path / "there"))
    assert result.exit_code == 0, result.output
    assert "all_reduce(float32 [4], SUM)" in (tmp_path / "out" / "report.html").read_text()


SLEEPER = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path(sys.argv[2]).touch()
    sys.exit(7)
signal.signal(int(sys.argv[3]), end)
pathlib.Path(sys.argv[1]).touch()
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_program_and_nothing_stays(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    ready, told = tmp_path / "ready", tmp_path / "told"
    program = [sys.executable, str(tmp_path / "sleeper.py"), str(ready), str(told), str(int(number))]
    command = [sys.executable, "-m", "unisono.cli", "trace", "--out", str(tmp_path / "out"), "--", *program]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    before = signal.signal(number, signal.SIG_DFL)  # under nohup a child would ignore SIGHUP
    tracer = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    signal.signal(number, before)
    with tracer:
        while not ready.exists():
            assert tracer.poll() is None
            time.sleep(0.01)
        tracer.send_signal(number)
        _, said = tracer.communicate(timeout=20)
    assert (tracer.returncode, told.exists()) == (7, True)
    assert said.startswith("unisono: no rank has left a record")
    assert not list(tmp_path.glob("unisono-trace-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "/nowhere/python"], "cannot run /nowhere/python: No such file"),
        (["--", "true"], "no rank has left a record"),
        (["--out", "/proc/none", "--", "true"], "cannot make the directory /proc/none"),
        ([], "give a program to run after --, or --from DIR"),
        (["--from", ".", "--", "true"], "give a program to run after --, or --from DIR"),
        (["--from", "."], "no rank has left a record"),
        (["--from", "nowhere"], "there is no directory nowhere: expected the one that UNISONO_TRACE named"),
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
    assert not list(tmp_path.iterdir())  # no folder of results either
