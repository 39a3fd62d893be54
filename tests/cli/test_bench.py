import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ranks import ranks
from unisono.bench.result import Rates, Row
from unisono.bench.result import Result as Measured
from unisono.bench.settings import COLLECTIVES, Settings
from unisono.cli import bench
from unisono.cli.main import app

FEW = ("-b", "8", "-e", "1K", "-f", "128", "--runs", "3", "--seconds", "0.05")


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_prints_writes_draws_and_compares(tmp_path: Path) -> None:
    json, plot = tmp_path / "a.json", tmp_path / "a.png"
    result = _bench("all_reduce", "barrier", *FEW, "--against", "gloo", "--json", str(json), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("# 2 ranks, not pinned")
    columns = next(line for line in lines if "#wrong" in line).split()[1:]
    assert columns == [
        "size", "count", "type", "redop", "time", "±", "algbw", "busbw", "#wrong", "bound", "limit", "gloo", "ratio",
    ]  # fmt: skip
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:4] for row in rows] == [
        ["8", "2", "float32", "sum"],
        ["1024", "256", "float32", "sum"],
        ["0", "0", "float32", "none"],
    ]
    for row in rows:
        assert len(row) == len(columns)
        assert row[8] == "0"
        assert float(row[12]) == pytest.approx(float(row[11]) / float(row[4]), rel=0.01)
    assert "# all 6 results checked are right" in lines
    assert plot.read_bytes().startswith(b"\x89PNG")
    saved = Measured.load(json)
    assert saved.complete
    assert len(saved.rows) == 6
    compared = _bench("compare", str(json), str(json))
    assert compared.exit_code == 0, compared.output
    assert "# 0 faster, 0 slower, 6 noise; change in the middle 1.00 ×" in compared.stdout


def _stub(rows: list[Row], then: Callable[[], None]) -> Callable[[Settings, Callable[[Rates | Row], None]], None]:
    def launch(settings: Settings, tell: Callable[[Rates | Row], None]) -> None:
        tell(Rates((64,), (1e9,), (1e9,)))
        for row in rows:
            tell(row)
        then()

    return launch


ROW = Row("all_reduce", "unisono", 8, 2, "float32", "sum", "in", 2, 10, (1e-5,), 0)


def _exit_as_on_sigterm() -> None:
    raise SystemExit(143)


ENDS = {130: lambda: signal.raise_signal(signal.SIGINT), 143: _exit_as_on_sigterm}


@pytest.mark.parametrize("code", ENDS)
def test_ctrl_c_and_sigterm_print_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    monkeypatch.setattr(bench, "launch", _stub([ROW], ENDS[code]))
    result = _bench("--json", str(tmp_path / "a.json"))
    assert result.exit_code == code
    assert "10.00" in result.stdout
    assert "# interrupted: this is what was measured until then" in result.stdout
    saved = Measured.load(tmp_path / "a.json")
    assert (saved.rows, saved.complete) == ([ROW], False)


def test_what_was_measured_is_written_though_the_terminal_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(text: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def hang_up() -> None:
        monkeypatch.setattr(bench, "echo", gone)
        raise SystemExit(129)

    monkeypatch.setattr(bench, "launch", _stub([ROW], hang_up))
    assert _bench("--json", str(tmp_path / "a.json")).exit_code != 0
    assert Measured.load(tmp_path / "a.json").rows == [ROW]


@pytest.mark.parametrize("code", ENDS)
def test_nothing_is_written_if_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    monkeypatch.setattr(bench, "launch", _stub([], ENDS[code]))
    earlier, plot = tmp_path / "a.json", tmp_path / "a.png"
    earlier.write_text("of an earlier run")
    result = _bench("--json", str(earlier), "--plot", str(plot))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (code, "# nothing measured")
    assert earlier.read_text() == "of an earlier run"
    assert not plot.exists()


def test_a_wrong_result_is_shouted_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Row(**{**vars(ROW), "wrong": 3})
    monkeypatch.setattr(bench, "launch", _stub([wrong], lambda: None))
    result = _bench()
    assert result.exit_code == 1
    assert "# WRONG: unisono all_reduce 8 B, 3 elements" in result.stdout


def test_a_dead_rank_is_named() -> None:
    others = multiprocessing.active_children()

    def kill() -> None:
        while not (children := [child for child in multiprocessing.active_children() if child not in others]):
            time.sleep(0.01)
        assert children[0].pid
        os.kill(children[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = _bench("-e", "8", "--seconds", "60")
    killer.join()
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("unisono: rank ")
    assert set(multiprocessing.active_children()) <= set(others)


def as_torchrun_does(rank: int, world_size: int, port: int) -> tuple[int, str]:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {name: str(value) for name, value in place.items()}
    result = CliRunner().invoke(app, ["bench", "all_gather", *FEW], env=environment)
    return result.exit_code, result.output


def test_under_torchrun_each_process_is_a_rank() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    (code, output), other = ranks(2, group=False).run(as_torchrun_does, port)
    assert code == 0, output
    assert other == (0, "")
    assert output.count("# all_gather out of place") == 1
    assert "# all 2 results checked are right" in output


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    result = _bench("--device", "cuda", "--against", "nccl,symm_mem")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("unisono: --device cuda needs a GPU, but torch ")
    assert result.stderr.count("\n") == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = _bench("--device", "cuda", "-n", "4")
    assert result.stderr == "unisono: 4 ranks need a GPU each, but this host has 2: give --ranks 2\n"


def test_on_gpus_every_rank_has_one_and_rows_are_saved_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names, asked, kept = ("unisono", "nccl", "symm_mem:one_shot", "symm_mem:two_shot"), [], tmp_path / "a.json"
    rows = [Row(**{**vars(ROW), "contender": name, "device": "cuda", "timing": timing})
            for timing in ("graph", "eager") for name in names]  # fmt: skip

    def launch(settings: Settings, tell: Callable[[Rates | Row], None]) -> None:
        asked.append(settings)
        for row in rows:
            tell(row)
        assert len(Measured.load(kept).rows) == len(rows)

    monkeypatch.setattr(bench, "launch", launch)
    monkeypatch.setattr(bench, "count_gpus", lambda ranks: 3)
    monkeypatch.setattr(bench, "describe_gpus", lambda ranks: f"{ranks} × some GPU")
    result = _bench("all", "--device", "cuda", "--against", "nccl,symm_mem", "--quick", "--json", str(kept))
    assert result.exit_code == 0, result.output
    assert [contender.name for contender in asked[0].contenders] == [*names]
    assert (asked[0].ranks, asked[0].timings, asked[0].runs) == (3, ("graph", "between", "eager", "async"), 5)
    assert asked[0].listed == (4096, 65536, 1 << 20, 16 << 20)
    assert "barrier" not in asked[0].collectives
    assert result.stdout.startswith("# 3 ranks, 3 × some GPU; median of 5 runs")
    assert "# all_reduce in place, replay of CUDA graphs, the GPU's time of a call: unisono" in result.stdout
    assert "# eager: nccl takes 1.00 times as long" in result.stdout


def test_what_all_can_not_do_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(bench, "launch", lambda settings, tell: asked.append(settings))
    result = _bench("all", "all_reduce", "--in-place")
    assert (
        "# left out, for they have no in-place form: all_to_all, gather, scatter, barrier, send_recv" in result.stdout
    )
    assert asked[0].collectives == ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
    assert "left out" not in _bench("all").stdout
    assert asked[1].collectives == COLLECTIVES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_reduc"], "unknown collective 'all_reduc'"),
        (["all", "all_reduc"], "send_recv, all"),
        (["all", "gather", "--in-place"], "gather has no in-place form"),
        (["-b", "x"], "'x' is not a size"),
        (["--against", "ucc"], "unknown backend 'ucc'"),
        (["--against", "nccl"], "nccl is not measured on tensors of --device cpu: expected one of unisono, gloo, mpi"),
        (["--device", "cuda", "--against", "gloo"], "expected one of unisono, nccl, symm_mem"),
        (["--timing", "graph"], "--timing graph is of GPUs: give --device cuda as well"),
        (["barrier", "--device", "cuda"], "barrier is of processes"),
        (["--backend", "gloo", "--algorithm", "ring"], "--algorithm is for unisono"),
        (["--json", "/nowhere/a.json"], "the directory /nowhere does not exist"),
        (["compare", "a.json"], "compare takes two files"),
        (["compare", "a.json", "b.json"], "cannot read a.json"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.count("\n") == 1
